"""Published measurements as rows of a table: what was trained, on what, how it was divided, and what came of it.

Columns are those of a calibration file: ``row_id, source_id, framework, hw, gpu_mem_gb, peak_tflops, n_devices,
dev_per_node, intra_bw_GBps, inter_bw_GBps_per_dev, model, n_params, layers, hidden, heads, ffn, vocab, seq, dp, tp, pp,
vpp, cp, ep, zero, mbs, ga, gbs, precision, recompute, schedule`` and the outcomes ``step_time_s, samples_per_s,
tflops_per_dev, mem_gib, status``; others are not looked at. Any but the first may be blank.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

from paceline.core.errors import InputError

GIB = 2.0**30

MOST_OF_ALL = 1e18
MOST = {
    "layers": 1e4,
    "hidden": 1e6,
    **dict.fromkeys(("heads", "vpp", "gpu_mem_gb", "peak_tflops", "tp", "dev_per_node"), 1e5),
    **dict.fromkeys(("ffn", "vocab", "n_devices", "dp", "pp", "cp", "ep", "mbs", "ga"), 1e7),
    **dict.fromkeys(("seq", "gbs"), 1e9),
}
"""What no row goes beyond: columns that were mixed up do."""


@dataclass(frozen=True)
class Row:
    """One line, by the names of its columns.

    >>> row = Row({"row_id": "a-1", "n_devices": "8", "dp": "", "hw": "DGX-H100"})
    >>> row.number("n_devices"), row.number("dp"), row.whole("dp", 1), row.family
    (8.0, None, 1, 'H100')
    """

    told: Mapping[str, str]

    def text(self, column: str) -> str:
        """What stands there; empty where nothing does, or only what tables write for nothing."""
        found = (self.told.get(column) or "").strip()
        return "" if found.lower() in ("nan", "na", "n/a", "null") else found

    def number(self, column: str) -> float | None:
        """The same as a number.

        Raises:
            InputError: it is none, below 0, or more than anything has.
        """
        text = self.text(column)
        try:
            found = float(text) if text else None
        except ValueError:
            found = inf
        if found is None:
            return None
        if not isfinite(found):
            raise InputError(f"row {self.name}: {column} = {text!r} is no number; write a number or leave it blank.")
        most = MOST.get(column, MOST_OF_ALL)
        if not 0 <= found <= most:
            raise InputError(
                f"row {self.name}: {column} = {text!r} is not from 0 to {most:g}; write what it was or leave it blank."
            )
        return found

    def whole(self, column: str, otherwise: int) -> int:
        """The same as a whole number of at least 1."""
        found = self.number(column)
        return max(1, round(found)) if found else otherwise

    @property
    def name(self) -> str:
        """Of the row."""
        return self.text("row_id")

    @property
    def source(self) -> str:
        """Who published it."""
        return self.text("source_id")

    @property
    def model(self) -> str:
        """What it is called there."""
        return self.text("model")

    @property
    def family(self) -> str:
        """Of its device: the first of those that are known whose name is in ``hw``, or else what stands there."""
        text = self.text("hw").upper()
        return next((name for name in FAMILIES if name in text), text)

    @property
    def framework(self) -> str:
        """Its first word: what follows are versions and options."""
        return self.text("framework").split(" ")[0].split("/")[0]

    @property
    def step_s(self) -> float | None:
        """Measured, or by samples in a second; None: not known."""
        step_s, rate, batch = self.number("step_time_s"), self.number("samples_per_s"), self.number("gbs")
        return step_s or (batch / rate if batch and rate else None)

    @property
    def held_bytes(self) -> float | None:
        """Measured on the worker that held the most."""
        found = self.number("mem_gib")
        return found * GIB if found else None

    @property
    def doubtful(self) -> bool:
        """Whether its source's numbers contradict each other, or leave open what its time hangs on."""
        unfilled = self.whole("pp", 1) > 1 and not self.number("mbs")
        undivided = self.whole("n_devices", 1) > 1 and not any(map(self.text, ("dp", "tp", "pp")))
        return self.text("status") == "suspect" or unfilled or undivided

    @property
    def group(self) -> tuple[str, str]:
        """What is left out together: rows of one source about one model."""
        return self.source, self.model


FAMILIES = ("GB300", "GB200", "B300", "B200", "H200", "H100", "A100", "V100", "P100", "P40", "T4", "A64FX")
"""The first that is found counts: GB200 before B200."""


def read(path: Path) -> list[Row]:
    """All of a file.

    Raises:
        InputError: it can't be read, has no column ``row_id``, or names a row twice.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if "row_id" not in (table.fieldnames or ()):
                raise InputError(f"{path} has no column row_id; write one with a name of its own for each row.")
            rows = [Row({name: text for name, text in told.items() if name}) for told in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} can't be read ({error}); write the path of a CSV file.") from None
    _refuse(rows, path)
    return rows


def _refuse(rows: Iterable[Row], path: Path) -> None:
    seen: set[str] = set()
    for row in rows:
        if not row.name:
            raise InputError(f"{path} has a row without row_id; write a name of its own into each row.")
        if row.name in seen:
            raise InputError(f"{path} has two rows {row.name}; write a name of its own into each row.")
        seen.add(row.name)
