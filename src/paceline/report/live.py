"""The page of a run that is under way: what ``progress.jsonl`` and ``workers.json`` in its folder say, as HTML.

::

    main of the run     append a line ... append a line ..................... save the run, remove both files
    WatchedRun          poll: read what is new; html: curves so far           html: the report of the saved run

The files may be anybody's: text is escaped, and what is no number is drawn nowhere.
"""

import contextlib
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from paceline.core.errors import InputError
from paceline.core.records import Record
from paceline.core.safe_files import open_regular, read_bytes
from paceline.engine.worker_metrics import PROGRESS_NAME
from paceline.plots.curves import DASHES, PALETTE
from paceline.progress import clock
from paceline.report import figures
from paceline.report.inputs import StrategyRuns, sections
from paceline.report.page import CURVES, figure_grid, section_html, table
from paceline.run import Run

# Points of a curve; beyond, every other one is left out.
MOST_POINTS = 2000

# Bytes of workers.json that are read, and of one poll of the lines.
_WORKERS_BYTES, _POLL_BYTES = 1 << 22, 1 << 24


class Curve:
    """Points of one line, of which no more are kept than can be seen."""

    def __init__(self) -> None:
        self.x, self.y = list[float](), list[float]()
        self._every, self._count = 1, 0

    def add(self, x: float, y: float) -> None:
        """Add a point, unless it is one of those that are left out."""
        if self._count % self._every == 0:
            self.x.append(x)
            self.y.append(y)
        self._count += 1
        if len(self.x) > MOST_POINTS:
            self.x, self.y, self._every = self.x[::2], self.y[::2], 2 * self._every


class WatchedRun:
    """A run under way, or one that is saved.

    Args:
        folder: of the run, which its ``out=`` names.

    Raises:
        InputError: no run is under way there, and none is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0
        """Grows with each change of what :meth:`html` returns."""
        self.head: dict[str, Any] = {}
        self.records: list[Record] = []
        self.newest: dict[str, Any] = {}
        self.loss, self.logged = Curve(), dict[str, dict[int, Curve]]()
        self.departures: list[str] = []
        self.checkpoint: str | None = None
        self.end: dict[str, Any] | None = None
        self.saved = self.lost = False
        """Whether the folder has the saved run; whether the run has ended without a word."""
        self._workers: list[Any] = []
        self._rest = b""
        self._lines: BinaryIO | None = None
        self.poll()
        if self._lines is None and not self.saved:
            raise InputError(
                f"no run is under way in {folder}, and none is saved there; name the folder that out= or --out names"
            )

    @property
    def over(self) -> bool:
        """Whether nothing changes any more."""
        return self.saved or self.lost or (self.end is not None and bool(self.end.get("failed")))

    def poll(self) -> None:
        """Read what is new."""
        if self.over:
            return
        if self._lines is None:
            with contextlib.suppress(OSError, ValueError):
                self._lines = open_regular(self.folder / PROGRESS_NAME)
        gone = not (self.folder / PROGRESS_NAME).exists()  # before its last lines are read
        changed = self._read_lines() + self._read_workers()
        if (self.folder / "summary.json").exists():
            self.saved, changed = True, 1
        elif self.end is None and self._lines is not None and not changed and (gone or self._writer_died()):
            self.lost, changed = True, 1
        self.version += changed > 0

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()

    # ---------------------------------------------------------------------------------------------------------- reading

    def _read_lines(self) -> int:
        """Read the lines that have been appended; return how many there were."""
        if self._lines is None:
            return 0
        *lines, self._rest = (self._rest + (self._lines.read(_POLL_BYTES) or b"")).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                row = json.loads(line)
                event, at = row.pop("event"), row.pop("at")
                self._take(event, row, float(at))
        return len(lines)

    def _take(self, event: str, row: dict[str, Any], at: float) -> None:
        if event in ("start", "process"):
            self.head |= {name: row[name] for name in row if isinstance(row[name], (str, int))}
        elif event == "record":
            known = {name: value for name, value in row.items() if value is not None or name in _FIXED}
            if any(not _plain(value) for value in known.values() if value is not None):
                raise ValueError("not a number")
            self.records.append(Record.of(known))
        elif event == "progress":
            self.newest = row | {"at": at}
            if _plain(row.get("loss")):
                self.loss.add(float(row["time_s"]), float(row["loss"]))
        elif event == "log":
            replica, step = int(row["replica"]), float(row["step"])
            for name, value in row["values"].items():
                if _plain(value):
                    self.logged.setdefault(name, {}).setdefault(replica, Curve()).add(step, value)
        elif event == "departure":
            self.departures.append(f"replica {int(row['replica'])} left after {row['time_s']:.1f} s: {row['reason']}")
        elif event == "checkpoint":
            self.checkpoint = str(row["path"])
        elif event == "end":
            self.end = row

    def _read_workers(self) -> int:
        rows = self._workers
        with contextlib.suppress(OSError, ValueError):
            read = json.loads(read_bytes(self.folder / "workers.json", most=_WORKERS_BYTES))
            rows = [row for row in read if isinstance(row, dict)] if isinstance(read, list) else []
        changed, self._workers = int(rows != self._workers), rows
        return changed

    def _writer_died(self) -> bool:
        """Return whether the process that writes the file is no more, if it is one of this host."""
        pid = self.head.get("pid")
        if self.head.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    # ------------------------------------------------------------------------------------------------------------- HTML

    def html(self) -> str:
        """Return the elements of the page, below its title."""
        if self.saved:
            try:
                return '<p id="state">ended</p>' + "\n".join(section_html(each) for each in sections([self.folder]))
            except InputError as error:
                return f'<p id="state">ended; the saved run can\'t be read: {escape(str(error))}</p>'
        return "\n".join(["<section>", *self._elements(), "</section>"])

    def _elements(self) -> Iterator[str]:
        head = {name: escape(str(self.head.get(name, "…"))) for name in ("program", "engine", "strategy")}
        yield f"<h2>{head['program']} on the {head['engine']} engine</h2><p><code>{head['strategy']}</code></p>"
        yield f'<p id="state">{escape(self._state())}</p>'
        remarks = self.newest.get("remarks")
        sentences = [str(each) for each in remarks] if isinstance(remarks, list) else []
        if items := [*self.departures, *sentences]:
            yield f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
        if self._workers:
            yield "<h3>Processes</h3>"
            yield _processes(self._workers)
        time = "virtual time, s" if self.head.get("engine") == "virtual" else "training time, s"
        yield "<h3>Over time</h3>"
        yield figure_grid([*self._curves(time), *(_lines(name, curves) for name, curves in self.logged.items())])

    def _curves(self, time: str) -> Iterator[str | None]:
        strategy = str(self.head.get("strategy", ""))
        run = Run(str(self.head.get("program", "")), strategy, str(self.head.get("engine", "")), {}, {}, self.records)
        group = StrategyRuns(strategy, strategy, PALETTE[0], DASHES[0], [run])
        if self.loss.x:
            title = "Loss of the newest gradients"
            yield figures.lines([("", self.loss.x, self.loss.y, PALETTE[0], "-")], title, time)
        others = dict.fromkeys(f"test_{name}" for record in self.records for name in record.test_metrics)
        for key, title, scale in [*CURVES, *((name, name, 1.0) for name in others)]:
            yield figures.curve([group], key, title, time=time, scale=scale)

    def _state(self) -> str:
        """Return in a sentence how far the run is."""
        if self.lost:
            return "ended without a report: its process is no more"
        if self.end is not None:
            stopped = self.end.get("stopped")
            why = ", by an error" if self.end.get("failed") else f", by a callback: {stopped}" if stopped else ""
            return f"ended{why}"
        newest, parts = self.newest, [str(self.newest.get("phase") or "starting")]
        if _plain(fraction := newest.get("fraction")):
            parts.append(f"{fraction:.0%} of the budget")
        if _plain(seconds := newest.get("time_s")):
            parts.append(clock(seconds))
        if _plain(updates := newest.get("updates")):
            parts.append(f"{updates:,} updates")
        if self.checkpoint is not None:
            parts.append(f"saved in {self.checkpoint}")
        return ", ".join(parts)


# Fields of a record that it has even where they are not known.
_FIXED = Record(0.0, 0, 0, 1, None, None).row().keys()


def _plain(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _processes(rows: Sequence[Mapping[str, Any]]) -> str:
    def named(row: Mapping[str, Any]) -> str:
        places = (f"{name} {row[name]}" for name in ("replica", "stage", "shard") if name in row)
        return ", ".join(places) or str(row.get("role", ""))

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return "replica" in row, *(str(row.get(name, "")).zfill(8) for name in ("replica", "stage", "shard"))

    cells = [(named(row), *(str(row.get(name, "")) for name in ("pid", "node"))) for row in sorted(rows, key=key)]
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in cells]
    head = "<thead><tr><th>of</th><th>pid</th><th>node</th></tr></thead>"
    return table(head, lines, "Replicas that have left or died are not among them.")


def _lines(name: str, curves: Mapping[int, Curve]) -> str:
    """Return the figure of one name that a loop logs: a line for each replica."""
    looks = [(PALETTE[i % len(PALETTE)], DASHES[i // len(PALETTE) % len(DASHES)]) for i in range(len(curves))]
    each = [(f"replica {r}", curves[r].x, curves[r].y, *look) for r, look in zip(sorted(curves), looks, strict=True)]
    return figures.lines(each, name, "step of the replica")
