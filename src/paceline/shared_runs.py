"""Jobs that took turns on the same workers: their slices, their runs, and both in files.

slices.json            the jobs in order, and what each slice took and reached
0-digits/  1-mnist/    the run of each job, as ``Run.save`` writes it; in a folder of checkpoints, its checkpoints
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.formatting import aligned
from paceline.core.records import Record
from paceline.core.safe_files import new_folder, read_json, reading, write_json
from paceline.core.types import Seconds
from paceline.metrics.short_forms import html_table
from paceline.metrics.summary import json_safe
from paceline.run import Run

FILE = "slices.json"


@dataclass(frozen=True)
class Slice:
    """One turn of a job."""

    job: str
    steps: int
    """Budget in steps of each replica that the job has had by its end."""
    seconds: Seconds
    """Training time, virtual or wall: no start-up, no evaluation, no checkpoint."""
    records: tuple[Record, ...]
    """What was recorded in it; in a job's first one also its start."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        rows = [json_safe(record.row()) for record in self.records]
        return {"job": self.job, "steps": self.steps, "seconds": self.seconds, "records": rows}


@dataclass(frozen=True, repr=False)
class SharedRuns:
    """Result of :func:`paceline.share_workers`; at a prompt a line for each job, in a notebook a table.

    Args:
        jobs: names, in the order in which they were given.
        runs: name -> the job's run so far, with its whole history; a job without a slice has none.
        slices: in the order in which they were made.
        ended: why, in a sentence.
        signal: name of the signal that ended it, ``SIGINT`` after Ctrl-C.
    """

    jobs: Sequence[str]
    runs: Mapping[str, Run]
    slices: Sequence[Slice]
    ended: str
    signal: str | None = None

    def __repr__(self) -> str:
        head = f"<SharedRuns {len(self.jobs)} jobs, {self._head()}"
        lines = (f"  {job}: {repr(self.runs[job])[1:-1] if job in self.runs else 'no slice'}" for job in self.jobs)
        return "\n".join([head, *lines]) + ">"

    def _repr_html_(self) -> str:
        titles, *rows = self._rows()
        return html_table(self._head(), rows, titles=titles)

    def _head(self) -> str:
        return f"{len(self.slices)} slices, {self.seconds:.1f} s of training; {self.ended}"

    @property
    def interrupted(self) -> bool:
        """Return whether a signal ended it."""
        return self.signal is not None

    @property
    def seconds(self) -> Seconds:
        """Training time of all slices."""
        return sum(each.seconds for each in self.slices)

    def of(self, job: str) -> list[Slice]:
        """Return the slices of one job."""
        return [each for each in self.slices if each.job == job]

    def table(self) -> str:
        """Return the jobs as text, one line each: slices, steps, training time, and losses at start and end."""
        rows = self._rows()
        return "\n".join([self._head(), "", *aligned(rows, right=rows[0][1:])])

    def _rows(self) -> list[tuple[str, ...]]:
        """Return titles, and the cells of each job."""
        rows: list[tuple[str, ...]] = [
            ("job", "slices", "steps", "seconds", "training loss", "test loss", "test accuracy")
        ]
        for job in self.jobs:
            own = self.of(job)
            if not own:
                rows.append((job, "0", "0", "0.0", "-", "-", "-"))
                continue
            first, last = own[0].records[0], own[-1].records[-1]
            accuracy = "-" if last.test_accuracy is None else f"{last.test_accuracy:.2%}"
            losses = [_change(first.train_loss, last.train_loss), _change(first.test_loss, last.test_loss)]
            spent = f"{sum(each.seconds for each in own):.1f}"
            rows.append((job, str(len(own)), f"{own[-1].steps:,}", spent, *losses, accuracy))
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``paceline share --json`` prints."""
        return {
            "jobs": {job: run.to_json() for job, run in self.runs.items()},
            "slices": [each.to_json() for each in self.slices],
            "ended": self.ended,
        }

    def save(self, path: str | Path, *, tensorboard: bool = False) -> None:
        """Write slices and runs as a new folder, which appears whole or not at all.

        Args:
            path: path of the folder; it must not exist.
            tensorboard: also write each history as TensorBoard events.

        Raises:
            InputError: the folder exists or can't be made, or tensorboard is not installed.
        """
        with new_folder(path) as folder:
            write_slices(folder, self.jobs, self.slices)
            for index, job in enumerate(self.jobs):
                if job in self.runs:
                    self.runs[job].save(folder / job_folder(index, job), tensorboard=tensorboard)


def write_slices(folder: Path, jobs: Sequence[str], slices: Sequence[Slice]) -> None:
    """Write ``slices.json`` into a folder, replacing an older one."""
    write_json(folder / FILE, {"jobs": list(jobs), "slices": [each.to_json() for each in slices]})


def read_slices(folder: Path) -> tuple[list[str], list[Slice]]:
    """Read ``slices.json`` of a folder: the jobs, and their slices so far.

    Raises:
        InputError: it is missing or damaged; names it.
    """
    saved = read_json(folder / FILE)
    with reading(folder / FILE):
        jobs = [str(job) for job in saved["jobs"]]
        slices = [
            Slice(str(s["job"]), int(s["steps"]), float(s["seconds"]), tuple(map(Record.of, s["records"])))
            for s in saved["slices"]
        ]
        if not all(each.job in jobs and each.records for each in slices):
            raise ValueError("a slice is of none of its jobs, or has no record")
    return jobs, slices


def job_folder(index: int, job: str) -> str:
    """Return the name of a job's folder.

    >>> job_folder(1, "models.py:wide")
    '1-models.py-wide'
    """
    # At most 80 characters: file systems bound a name at 255 bytes.
    return f"{index}-{re.sub(r'[^A-Za-z0-9.]+', '-', job).strip('-.')[:80] or 'job'}"


def _change(first: float | None, last: float | None) -> str:
    if last is None:
        return "-"
    return f"{last:.4f}" if first is None else f"{first:.4f} -> {last:.4f}"
