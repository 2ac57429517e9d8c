"""Published measurements as rows of a table: what was trained, on what, how it was divided, and what came of it.

Columns are those of a calibration file: ``row_id, source_id, framework, hw, gpu_mem_gb, peak_tflops, n_devices,
dev_per_node, intra_bw_GBps, inter_bw_GBps_per_dev, model, n_params, layers, hidden, heads, ffn, vocab, seq, dp, tp, pp,
vpp, cp, ep, zero, mbs, ga, gbs, precision, recompute, schedule`` and the outcomes ``step_time_s, samples_per_s,
tflops_per_dev, mem_gib, status``; others are ignored. Any but the first may be blank.

The operations of a model without a shape, for a sample, follow from the first of these that is available:

1. rows that give operations and samples in a second of a model of this name;
2. 6 operations for each active parameter and word (2001.08361, section 2.1): "Qwen3_30B_a3B" has 3 · 10⁹ active ones;
3. what is published of it, below.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from statistics import median

from paceline.core.errors import InputError

GIB = 2.0**30

MOST_OF_ALL = 1e18
# Upper bounds: columns that were mixed up exceed them.
MOST = {
    "layers": 1e4,
    "hidden": 1e6,
    **dict.fromkeys(("heads", "vpp", "gpu_mem_gb", "peak_tflops", "tp", "dev_per_node"), 1e5),
    **dict.fromkeys(("ffn", "vocab", "n_devices", "dp", "pp", "cp", "ep", "mbs", "ga"), 1e7),
    **dict.fromkeys(("seq", "gbs"), 1e9),
}


@dataclass
class PublishedRow:
    """One line, by the names of its columns.

    >>> row = PublishedRow({"row_id": "a-1", "n_devices": "8", "dp": "", "hw": "DGX-H100"})
    >>> row.number("n_devices"), row.number("dp"), row.whole("dp", 1), row.family
    (8.0, None, 1, 'H100')
    """

    cells: Mapping[str, str]
    name: str = field(init=False, repr=False)
    """The row's id."""
    source: str = field(init=False, repr=False)
    """The publication."""
    model: str = field(init=False, repr=False)
    """The model's name in the publication."""
    group: tuple[str, str] = field(init=False, repr=False)
    """The rows that are left out together: those of one source about one model."""
    framework: str = field(init=False, repr=False)
    """The framework's name, without versions and options."""
    family: str = field(init=False, repr=False)
    """The device family: the first known name that ``hw`` contains, or else ``hw`` itself."""

    def __post_init__(self) -> None:
        self.name, self.source, self.model = self.text("row_id"), self.text("source_id"), self.text("model")
        self.group, device = (self.source, self.model), self.text("hw").upper()
        self.framework = self.text("framework").split(" ")[0].split("/")[0]
        self.family = next((name for name in FAMILIES if name in device), device)

    def text(self, column: str) -> str:
        """Return the text of a cell; empty if the cell is blank or says that there is none."""
        text = (self.cells.get(column) or "").strip()
        return "" if text.lower() in ("nan", "na", "n/a", "null") else text

    def number(self, column: str) -> float | None:
        """Return a cell as a number; None if it is blank.

        Raises:
            InputError: it is no number, below 0, or above the column's bound.
        """
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = inf
        if not isfinite(value):
            raise InputError(f"row {self.name}: {column} = {text!r} is no number; write a number or leave it blank.")
        most = MOST.get(column, MOST_OF_ALL)
        if not 0 <= value <= most:
            raise InputError(
                f"row {self.name}: {column} = {text!r} is not from 0 to {most:g}; write what it was or leave it blank."
            )
        return value

    def whole(self, column: str, otherwise: int) -> int:
        """Return a cell as a whole number of at least 1, or else ``otherwise``."""
        value = self.number(column)
        return max(1, round(value)) if value else otherwise

    @property
    def step_s(self) -> float | None:
        """The step time, measured or from samples per second; None: not known."""
        step_s, rate, batch = self.number("step_time_s"), self.number("samples_per_s"), self.number("gbs")
        return step_s or (batch / rate if batch and rate else None)

    @property
    def peak_bytes(self) -> float | None:
        """The memory of the worker that held the most; None: not known."""
        memory = self.number("mem_gib")
        return memory * GIB if memory else None

    @property
    def doubtful(self) -> bool:
        """Whether its source's numbers contradict each other, or leave open what its time depends on."""
        unfilled = self.whole("pp", 1) > 1 and not self.number("mbs")
        undivided = self.whole("n_devices", 1) > 1 and not any(map(self.text, ("dp", "tp", "pp")))
        return self.text("status") == "suspect" or unfilled or undivided


# The first match counts: GB200 before B200.
FAMILIES = ("GB300", "GB200", "B300", "B200", "H200", "H100", "A100", "V100", "P100", "P40", "T4", "A64FX")


def read(path: Path) -> list[PublishedRow]:
    """Return all rows of a file.

    Raises:
        InputError: it can't be read, has no column ``row_id``, or names a row twice.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if "row_id" not in (table.fieldnames or ()):
                raise InputError(f"{path} has no column row_id; write one with a name of its own for each row.")
            rows = [PublishedRow({name: text for name, text in cells.items() if name}) for cells in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} can't be read ({error}); write the path of a CSV file.") from None
    names = set[str]()
    for name in (row.name for row in rows):
        if not name:
            raise InputError(f"{path} has a row without row_id; write a name of its own into each row.")
        if name in names:
            raise InputError(f"{path} has two rows {name}; write a name of its own into each row.")
        names.add(name)
    return rows


# Active parameters, by the models' own reports: DeepSeek-V3 (2412.19437), Mixtral (2401.04088) and the cards of the
# others, rounded; used if no row says more.
ACTIVE: Mapping[str, float] = {
    "deepseekv3": 37e9, "kimi_k2": 32e9, "gpt oss 120b": 5.1e9, "gpt oss 20b": 3.6e9, "nemotron_3_nano": 3.2e9,
    "nemotron_3_super": 12e9, "mixtral_8x7b": 12.9e9, "mixtral_8x22b": 39e9,
}  # fmt: skip

# Operations of forward on an image of 224 × 224: table 1 of 1512.03385, a product and a sum each.
FORWARD: Mapping[str, float] = {"resnet50": 7.6e9, "resnet101": 15.2e9, "resnet152": 22.6e9}

UNKNOWN_PARAMETERS = 1e9


def rates(rows: Iterable[PublishedRow]) -> dict[str, float]:
    """Return operations for a word by model, or for a sample if samples have no words, as rows give them.

    >>> cells = {"model": "M", "n_devices": "8", "samples_per_s": "4", "tflops_per_dev": "100", "seq": "1000"}
    >>> rates([PublishedRow(cells)])
    {'m': 200000000000.0}
    """
    by_model: dict[str, list[float]] = {}
    for row in rows:
        operations, samples = row.number("tflops_per_dev"), row.number("samples_per_s")
        if operations and samples:
            words = samples * row.whole("seq", 1)
            by_model.setdefault(row.model.lower(), []).append(operations * 1e12 * row.whole("n_devices", 1) / words)
    return {model: median(many) for model, many in by_model.items()}


def flops(row: PublishedRow, flops_of: Mapping[str, float]) -> float:
    """Return the operations for one sample, forward and backward; at worst those of a model of 10⁹ parameters."""
    words = row.whole("seq", 1)
    if row.model.lower() in flops_of:
        return flops_of[row.model.lower()] * words
    for name, forward in FORWARD.items():
        if name in row.model.lower():
            return 3 * forward
    return 6 * active(row) * words


def of_images(row: PublishedRow) -> bool:
    """Return whether a row's samples are images, whose operations are known without words."""
    return any(name in row.model.lower() for name in FORWARD)


def active(row: PublishedRow) -> float:
    """Return the parameters that a word passes through.

    >>> names = ("Qwen3_30B_a3B", "DeepSeekV3 (w/o MTP)", "Nemotron-340B", "gpt-350m")
    >>> [active(PublishedRow({"model": name})) for name in names]
    [3000000000.0, 37000000000.0, 340000000000.0, 350000000.0]
    """
    for name, many in ACTIVE.items():
        if name in row.model.lower():
            return many
    mixture = re.search(r"a(\d+(?:\.\d+)?)b", row.model.lower())
    return float(mixture.group(1)) * 1e9 if mixture else whole(row)


def sized(row: PublishedRow) -> bool:
    """Return whether anything says how large a model is.

    >>> [sized(PublishedRow({"model": name})) for name in ("gpt-350m", "DeepSeekV3", "resnet50", "Abacus")]
    [True, True, True, False]
    """
    name = row.model.lower()
    named = any(each in name for each in (*ACTIVE, *FORWARD))
    return named or bool(row.number("n_params") or _written(name))


def hidden(row: PublishedRow) -> float:
    """Return the hidden size as given, or from 12 · layers · hidden² parameters with layers = hidden / 100.

    >>> hidden(PublishedRow({"hidden": "4096"})), round(hidden(PublishedRow({"n_params": "8.05e9"})))
    (4096.0, 4063)
    """
    return float(row.whole("hidden", 0)) or (100 * active(row) / 12) ** (1 / 3)


def dense(row: PublishedRow) -> float | None:
    """Return the parameters that a dense model's name gives; None: it has experts, or its name gives no size.

    >>> names = ("Nemotron-340B", "Qwen3_30B_a3B", "Mixtral 8x7B", "DeepSeekV3", "resnet50")
    >>> [dense(PublishedRow({"model": name})) for name in names]
    [340000000000.0, None, None, None, None]
    """
    name = row.model.lower()
    experts = row.whole("ep", 1) > 1 or re.search(_EXPERTS, name) or any(each in name for each in ACTIVE)
    return None if experts else _written(name)


_EXPERTS = r"a\d+(\.\d+)?b|\d+x\d+|\d+e(?![a-z0-9])|moe"


def whole(row: PublishedRow) -> float:
    """Return all parameters, as given or by the model's name.

    >>> [whole(PublishedRow({"model": name})) for name in ("Qwen3_30B_a3B", "gpt-350m", "resnet")]
    [30000000000.0, 350000000.0, 1000000000.0]
    """
    return row.number("n_params") or _written(row.model.lower()) or UNKNOWN_PARAMETERS


def _written(name: str) -> float | None:
    """Return the parameters that a model's name gives."""
    match = re.search(r"(\d+(?:\.\d+)?)([bmt])(?![a-z0-9])", name)
    return float(match.group(1)) * {"m": 1e6, "b": 1e9, "t": 1e12}[match.group(2)] if match else None
