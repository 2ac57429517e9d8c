"""A callback that notes what it is called with, and may end training or fail."""

from typing import Any

from paceline import Run
from paceline.callbacks import Callback


class Recording(Callback):
    """Notes each call, by its method.

    Args:
        stop_after: number of the record after which it ends training.
        stop_at: method that ends training when it is called.
        fails: method that raises.
    """

    def __init__(self, stop_after: int | None = None, stop_at: str = "", fails: str = "") -> None:
        self._stop_after, self._stop_at, self._fails = stop_after, stop_at, fails
        self.calls: list[tuple[str, Any]] = []
        self.handle: Any = None

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def of(self, name: str) -> list[Any]:
        return [value for each, value in self.calls if each == name]

    def on_start(self, run: Any) -> None:
        self.handle = run
        self._note("start", (run.program, run.strategy, run.engine, run.out, len(run.history)), run)

    def on_record(self, record: Any, run: Any) -> None:
        assert run.history[-1] is record
        assert run.time_s >= record.time_s
        self._note("record", record, run)
        if len(self.of("record")) == self._stop_after:
            run.stop("enough")
            run.stop("more than enough")  # the first reason counts

    def on_departure(self, exit: Any, run: Any) -> None:
        self._note("departure", exit, run)

    def on_checkpoint(self, path: Any, run: Any) -> None:
        self._note("checkpoint", path, run)
        assert (path / "manifest.json").exists()

    def on_log(self, replica: int, step: int, values: Any, run: Any) -> None:
        self._note("log", (replica, step, dict(values)), run)

    def on_end(self, run: Run | None) -> None:
        self._note("end", run, None)

    def _note(self, name: str, value: Any, run: Any) -> None:
        self.calls.append((name, value))
        if name == self._fails:
            raise KeyError("torn")
        if name == self._stop_at:
            run.stop("enough")


def assert_whole(recording: Recording, run: Run) -> None:
    """It was called once at the start, then for all that the run has in its history, and once at the end."""
    names = recording.names()
    assert (names[0], names[-1]) == ("start", "end")
    assert (names.count("start"), names.count("end")) == (1, 1)
    assert sorted(recording.of("record"), key=lambda each: each.time_s) == run.history
    assert recording.of("departure") == run.left
    assert recording.of("end") == [run]


def assert_ended(recording: Recording, run: Run, steps: int) -> None:
    """It has ended a run of so many steps with its third record or later, and A is that of the last one."""
    assert_whole(recording, run)
    assert len(run.history) >= 3
    assert run.history[-1].updates == run.summary["updates"]
    assert run.summary["steps"] < steps
    assert (run.summary["stopped"], run.summary["interrupted"]) == ("enough", False)
