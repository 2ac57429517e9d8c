"""Run: what ``train`` returns, and its saved form, a folder of plain files.

    strategy.toml      how it was trained, by which engine, which program
    history.csv        one line per record
    spans.jsonl        one line per span; empty where nothing was traced
    summary.json       the summary, and under "left" the replicas that died
    model.safetensors  parameters and buffers by full name

Nothing in it is pickled, so reading a stranger's run runs none of his code.
"""

import csv
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.core.errors import InputError
from paceline.core.records import RECORD_FIELDS, STATISTICS, Record, ReplicaExit
from paceline.metrics.summary import json_safe
from paceline.program import Program
from paceline.safe_files import (
    State,
    check_out,
    load_into,
    load_state,
    new_folder,
    read_json,
    reading,
    save_state,
    write_json,
)
from paceline.strategy import Strategy
from paceline.trace.spans import Span, read_spans, write_spans

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "check_out", "load"]


@dataclass(frozen=True)
class Run:
    """One finished run.

    Args:
        program_name: what reports call the program.
        strategy: as it was run; its text where it was loaded and names a policy that is not known here.
        engine: the engine's name.
        state: the trained parameters and buffers by full name, on the CPU.
        summary: the figures of :func:`paceline.metrics.summary.summarize`.
        history: records in order of time.
        left: replicas that died.
        spans: what happened, when, on which worker; empty unless traced.
        model: the trained module; None where it was loaded without its program.
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

    def history_frame(self) -> "pd.DataFrame":
        """The history as a pandas table, one row a record; raises InputError where pandas is not installed."""
        _require("pandas", "history_frame()")
        import pandas as pd

        return pd.DataFrame([record.row() for record in self.history], columns=list(_columns(self.history)))

    def to_json(self) -> dict[str, Any]:
        """What ``paceline train --json`` prints."""
        head = {"strategy": str(self.strategy), "engine": self.engine}
        return head | self.results()

    def results(self) -> dict[str, Any]:
        """Summary, history and departures, ready for JSON."""
        return {
            "summary": json_safe(self.summary),
            "history": [json_safe(record.row()) for record in self.history],
            "left": [asdict(departure) for departure in self.left],
        }

    def save(self, path: str | Path, *, tensorboard: bool = False) -> None:
        """Write the run as a new folder, which appears whole or not at all.

        Args:
            path: of the folder; it must not exist.
            tensorboard: also write the history as TensorBoard events.

        Raises:
            InputError: the folder exists or can't be made, or tensorboard is not installed.
        """
        if tensorboard:
            require_tensorboard()
        with new_folder(path) as folder:
            self.write(folder)
            if tensorboard:
                _write_events(self.history, folder)

    def write(self, folder: Path) -> None:
        """Write the files into a folder that is there."""
        (folder / "strategy.toml").write_text(_toml(self), encoding="utf-8")
        _write_history(self.history, folder / "history.csv")
        write_spans(folder / "spans.jsonl", self.spans)
        results = self.results()
        write_json(folder / "summary.json", results["summary"] | {"left": results["left"]})
        save_state(self.state, folder / "model.safetensors")


def load(path: str | Path, program: Program | None = None) -> Run:
    """Read a saved run.

    Args:
        path: the folder that :meth:`Run.save` wrote.
        program: the program it was a run of; with it, ``.model`` is the trained module, without it None.

    Raises:
        InputError: a file is missing or damaged, or the parameters don't fit the program's model; names the file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{path} is no folder; write the path of a saved run")
    if (folder / "comparison.json").exists():
        one = next((run.parent for run in sorted(folder.glob("*/round-*/summary.json"))), folder / "…" / "round-0")
        raise InputError(f"{path} holds a comparison, not a run; write the path of one of its runs, {one}")
    name, engine, strategy = _read_toml(folder / "strategy.toml")
    summary = read_json(folder / "summary.json")
    with reading(folder / "summary.json"):
        left = [ReplicaExit(**row) for row in summary.pop("left")]
    weights = folder / "model.safetensors"
    state = load_state(weights)
    return Run(
        program_name=name,
        strategy=strategy,
        engine=engine,
        state=state,
        summary=summary,
        history=_read_history(folder / "history.csv"),
        left=left,
        spans=read_spans(folder / "spans.jsonl"),
        model=None if program is None else load_into(program.build(), state, weights),
    )


def require_tensorboard() -> None:
    """Raise InputError, with the line to run, where TensorBoard events can't be written."""
    _require("tensorboard", "tensorboard=True")


def _require(package: str, what: str) -> None:
    if find_spec(package) is None:
        raise InputError(f"{what} needs {package}, which is not installed; run: pip install 'paceline[{package}]'")


def _toml(run: Run) -> str:
    told = {"program": run.program_name, "engine": run.engine, "strategy": str(run.strategy)}
    # A JSON string is a TOML string, but for DEL, which JSON leaves as it is and TOML refuses.
    lines = [
        f"{key} = {json.dumps(said, ensure_ascii=False)}\n".replace("\x7f", "\\u007f") for key, said in told.items()
    ]
    fields = "" if isinstance(run.strategy, str) else f"\n# field by field\n{run.strategy.to_toml()}"
    return "".join(lines) + fields


def _read_toml(path: Path) -> tuple[str, str, Strategy | str]:
    """Program, engine and strategy."""
    with reading(path):
        told = tomllib.loads(path.read_text(encoding="utf-8"))
        return str(told["program"]), str(told["engine"]), _strategy(str(told["strategy"]))


def _strategy(text: str) -> Strategy | str:
    try:
        return Strategy.parse(text)
    except InputError:
        # A policy or threshold that only the program's own code knows must not keep its figures from being read.
        Strategy.parse(" ".join(word for word in text.split() if not word.startswith("aggregation=")))
        return text


def _columns(history: Sequence[Record]) -> dict[str, None]:
    return dict.fromkeys([*RECORD_FIELDS, *(key for record in history for key in record.row())])


def _write_history(history: Sequence[Record], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(_columns(history)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(record.row() for record in history)


def _read_history(path: Path) -> list[Record]:
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        if tuple(rows.fieldnames or ())[: len(RECORD_FIELDS)] != RECORD_FIELDS:
            raise ValueError(f"its first line should begin with {','.join(RECORD_FIELDS)}")
        return [_record(row) for row in rows]


def _record(row: dict[str, str]) -> Record:
    if None in row or None in row.values():
        raise ValueError(f"a line does not have as many fields as the first: {row}")
    fixed: dict[str, Any] = {key: _READERS.get(key, _number)(row.pop(key)) for key in RECORD_FIELDS}
    told = {key: _number(row.pop(key)) for key in STATISTICS if key in row}
    others = {key.removeprefix("test_"): float(text) for key, text in row.items() if text}
    return Record(**fixed, test_metrics=others, statistics=told)


def _number(text: str) -> float | None:
    return float(text) if text else None


_READERS: Mapping[str, Callable[[str], float]] = {"time_s": float, "updates": int, "gradients": int, "threshold": int}


def _write_events(history: Sequence[Record], folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for record in history:
            for name, value in record.row().items():
                if value is not None:
                    writer.add_scalar(name, value, record.updates, walltime=record.time_s)
