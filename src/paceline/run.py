"""Run: the result of ``train``, and its saved form, a folder of plain files.

    strategy.toml      the strategy, the engine's name and the program's name
    history.csv        one line per record
    spans.jsonl        one line per span; empty if nothing was traced
    summary.json       the summary, and under "left" the replicas that left before the end
    model.safetensors  parameters and buffers by full name
    manifest.json      size and SHA-256 of each of these

Nothing in it is pickled, so reading the run of a stranger executes none of the stranger's code.
"""

import csv
import io
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.checkpoint.manifest import MANIFEST, Manifest
from paceline.core.errors import InputError
from paceline.core.records import RECORD_FIELDS, STATISTICS, Record, ReplicaExit
from paceline.core.safe_files import (
    check_safetensors,
    new_folder,
    open_regular,
    read_bytes,
    read_json,
    reading,
    write_json,
)
from paceline.metrics.short_forms import figures, html_table, sentence
from paceline.metrics.summary import json_safe
from paceline.plots import plot, plot_svg
from paceline.program import Program
from paceline.strategy import Strategy, without_classes
from paceline.trace.spans import Span, read_spans, write_spans

if TYPE_CHECKING:
    import pandas as pd

    from paceline.plots.curves import Plot

__all__ = ["Run", "load"]

# What every saved run has, beside its manifest.
FILES = ("strategy.toml", "history.csv", "spans.jsonl", "summary.json", "model.safetensors")

# A strategy has a few lines.
_LARGEST_TOML_BYTES = 1 << 16
_MOST_DOTS = 2000

# Parameters and buffers by full name.
State: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, repr=False)
class Run:
    """One finished run; at a prompt one line, in a notebook a table with the curves.

    Args:
        program_name: name of the program in reports.
        strategy: the strategy of the run; its text if the run was loaded and names a policy that is not registered.
        engine: name of the engine.
        state: trained parameters and buffers by full name, on the CPU.
        summary: figures of :func:`paceline.metrics.summary.summarize`, units in the keys.
        history: records in order of time.
        left: replicas that left before the end.
        spans: start and end of each action of each worker, in nanoseconds; empty unless traced.
        model: the trained module; None if the run was loaded without its program.
    """

    program_name: str
    strategy: Strategy | str
    engine: str
    state: State
    summary: dict[str, Any]
    history: list[Record]
    left: list[ReplicaExit] = field(default_factory=list[ReplicaExit])
    spans: list[Span] = field(default_factory=list[Span])
    model: nn.Module | None = None

    def __repr__(self) -> str:
        return f"<Run {self.program_name}, {self.strategy}, engine={self.engine}: {sentence(self.summary)}>"

    def _repr_html_(self) -> str:
        rows = [("strategy", str(self.strategy)), ("engine", self.engine), *figures(self.summary).items()]
        drawing = plot_svg({str(self.strategy): [self.history]}, virtual=self.engine == "virtual")
        return html_table(self.program_name, rows, drawing=drawing)

    def plot(self) -> "Plot":
        """Return accuracy and losses over training time and over updates, as a figure of matplotlib.

        ``run.plot().savefig("run.png")`` writes it; a notebook shows it.

        Raises:
            InputError: matplotlib is not installed.
        """
        require_package("matplotlib", "run.plot()", extra="plots")
        title, virtual = f"{self.program_name}: {self.strategy}", self.engine == "virtual"
        return plot({str(self.strategy): [self.history]}, title, virtual=virtual)

    def history_frame(self) -> "pd.DataFrame":
        """Return the history as a pandas table, one row per record.

        Raises:
            InputError: pandas is not installed.
        """
        require_package("pandas", "history_frame()")
        import pandas as pd

        return pd.DataFrame([record.row() for record in self.history], columns=self._columns())

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``paceline train --json`` prints."""
        return {"strategy": str(self.strategy), "engine": self.engine} | self.results()

    def results(self) -> dict[str, Any]:
        """Return summary, history and departures, ready for JSON."""
        return {
            "summary": json_safe(self.summary),
            "history": [json_safe(record.row()) for record in self.history],
            "left": [asdict(departure) for departure in self.left],
        }

    def save(self, path: str | Path, *, tensorboard: bool = False, files: Mapping[str, bytes] | None = None) -> None:
        """Write the run as a new folder, which appears whole or not at all.

        Args:
            path: path of the folder; it must not exist.
            tensorboard: also write the history as TensorBoard events.
            files: contents of more files of the folder, by name.

        Raises:
            InputError: the folder exists or can't be written, or tensorboard is not installed.
        """
        if tensorboard:
            require_package("tensorboard", "tensorboard=True")
        head = {"program": self.program_name, "engine": self.engine, "strategy": str(self.strategy)}
        # A JSON string is a TOML string, except for DEL, which JSON leaves as it is and TOML refuses.
        lines = [
            f"{key} = {json.dumps(text, ensure_ascii=False)}\n".replace("\x7f", "\\u007f") for key, text in head.items()
        ]
        if isinstance(self.strategy, Strategy):
            lines.append(f"\n# field by field\n{self.strategy.to_toml()}")
        results = self.results()
        with new_folder(path) as folder:
            (folder / "strategy.toml").write_text("".join(lines), encoding="utf-8")
            with (folder / "history.csv").open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, self._columns(), lineterminator="\n")
                writer.writeheader()
                writer.writerows(record.row() for record in self.history)
            write_spans(folder / "spans.jsonl", self.spans)
            write_json(folder / "summary.json", results["summary"] | {"left": results["left"]})
            save_state(self.state, folder / "model.safetensors")
            # Not at the top: it is an extra, and slow to import.
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                with SummaryWriter(str(folder)) as events:
                    for record in self.history:
                        write_scalars(events, record)
            for name, content in (files or {}).items():
                (folder / name).write_bytes(content)
            (folder / MANIFEST).write_text(Manifest.of_files(head, folder).to_json(), encoding="utf-8")

    def _columns(self) -> list[str]:
        return list(dict.fromkeys([*RECORD_FIELDS, *(key for record in self.history for key in record.row())]))


def load(path: str | Path, program: Program | None = None) -> Run:
    """Read a saved run.

    Args:
        path: the folder that :meth:`Run.save` wrote.
        program: the program of the run; with it, ``.model`` is the trained module, without it None.

    Returns:
        The run.

    Raises:
        InputError: a file is missing or damaged, or the parameters don't fit the program's model; names the file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{path} is no folder; write the path of a saved run")
    if (folder / "comparison.json").exists():
        one = next((run.parent for run in sorted(folder.glob("*/round-*/summary.json"))), folder / "…" / "round-0")
        raise InputError(f"{path} holds a comparison, not a run; write the path of one of its runs, {one}")
    _verify(folder)
    with reading(folder / "strategy.toml"):
        text = read_bytes(folder / "strategy.toml", most=_LARGEST_TOML_BYTES).decode()
        if text.count(".") > _MOST_DOTS:
            raise ValueError("its keys are nested too deep")
        head = tomllib.loads(text)
        name, engine, text = str(head["program"]), str(head["engine"]), str(head["strategy"])
        strategy: Strategy | str = text
        try:
            strategy = Strategy.parse(text)
        except InputError:
            # The figures must stay readable even if only the program's own code knows a policy or a schedule, say.
            Strategy.parse(without_classes(text))
    summary = read_json(folder / "summary.json")
    with reading(folder / "summary.json"):
        left = [ReplicaExit(**row) for row in summary.pop("left")]
    weights = folder / "model.safetensors"
    state, model = load_state(weights), None
    if program is not None:
        model = program.build()
        try:
            model.load_state_dict(dict(state))
        except RuntimeError as error:
            raise InputError(f"{weights} does not fit the program's model: {error}") from error
    history, spans = _read_history(folder / "history.csv"), read_spans(folder / "spans.jsonl")
    return Run(name, strategy, engine, state, summary, history, left, spans, model)


def _verify(folder: Path) -> None:
    """Compare the files of a run with its manifest; raise InputError, naming the file that is missing or damaged."""
    if not (folder / MANIFEST).exists() and (folder / "summary.json").exists():
        raise InputError(
            f"{folder / MANIFEST} is missing, so that damage to the other files would not be noticed; "
            "save the run again with this version of Paceline"
        )
    manifest = Manifest.read(folder)
    for name in FILES:
        if name not in manifest.files:
            raise InputError(f"{folder / MANIFEST} does not list {name}; write the path of a saved run")
    manifest.check_files(folder)


def save_state(state: State, path: Path) -> None:
    """Write tensors as safetensors; tied ones once, with their other names in the metadata under ``tied``."""
    kept, tied = dict[str, Tensor](), dict[str, str]()
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        view = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        owner = first.setdefault(view, name) if tensor.numel() else name
        if owner != name:
            tied[name] = owner
            continue
        tensor = tensor.detach().cpu()
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that are not contiguous, and two tensors in one storage.
        shared = storage in storages
        kept[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()
        storages.add(storage)
    try:
        save_file(kept, path, metadata={"tied": json.dumps(tied)})
    except SafetensorError as error:  # the disk is full, say
        raise OSError(f"{path}: {error}") from error


def load_state(path: Path) -> dict[str, Tensor]:
    """Return the tensors that :func:`save_state` wrote; tied names share one tensor again."""
    with reading(path):
        check_safetensors(path)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
                tied = json.loads((file.metadata() or {}).get("tied", "{}"))
                return state | {name: state[other] for name, other in tied.items()}
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(str(error)) from error


def write_scalars(events: Any, record: Record) -> None:
    """Write the figures of a record by TensorBoard's ``SummaryWriter``, over updates and training time."""
    for name, value in record.row().items():
        if value is not None:
            events.add_scalar(name, value, record.updates, walltime=record.time_s)


def require_package(package: str, feature: str, *, extra: str | None = None) -> None:
    """Raise InputError, with the line to run, if a package that a feature needs is not installed.

    Args:
        package: name to import it by.
        feature: what needs it.
        extra: of Paceline, that has it; None: it has the package's name.
    """
    if find_spec(package) is None:
        install = f"pip install 'paceline[{extra or package}]'"
        raise InputError(f"{feature} needs {package}, which is not installed; run: {install}")


def _read_history(path: Path) -> list[Record]:
    def number(text: str) -> float | None:
        return float(text) if text else None

    readers: dict[str, Any] = {"time_s": float, "updates": int, "gradients": int, "threshold": int}
    records: list[Record] = []
    with reading(path), open_regular(path) as file:
        rows = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline=""), strict=True)
        if tuple(rows.fieldnames or ())[: len(RECORD_FIELDS)] != RECORD_FIELDS:
            raise ValueError(f"its first line should begin with {','.join(RECORD_FIELDS)}")
        for row in rows:
            if None in row or None in row.values():
                raise ValueError(f"a line does not have as many fields as the first: {row}")
            # What is popped here is known; the rest are metrics of the program.
            fixed = {key: readers.get(key, number)(row.pop(key)) for key in RECORD_FIELDS}
            statistics = {key: number(row.pop(key)) for key in STATISTICS if key in row}
            metrics = {key.removeprefix("test_"): float(text) for key, text in row.items() if text}
            records.append(Record(**fixed, test_metrics=metrics, statistics=statistics))
    return records
