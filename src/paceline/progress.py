"""Live display of a run on stderr: its fraction of the budget, its rates, its newest scores."""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.core.types import Seconds
from paceline.engine.base import Progress

# Least time between two redraws; they are made by the thread that drives the run, and cost it time.
REDRAW_S: Seconds = 0.2

# Time after which there is a line about what is being done before training, where nothing is drawn.
SLOW_S: Seconds = 10.0

_STATISTICS = (
    ("noise_scale", "noise scale {:,.0f}"),
    ("efficiency", "efficiency {:.0%}"),
    ("goodput_samples_per_s", "goodput {:,.0f}/s"),
)


def figures(progress: Progress) -> str:
    """Return the known figures of a run in one line.

    >>> figures(Progress("training", 0.5, time_s=2.0, updates=500, threshold=3, staleness_mean=4.25, loss=0.5))
    '250 updates/s  loss 0.5000  K 3  staleness 4.2'
    >>> figures(Progress("training", 0.5, statistics={"noise_scale": 511.6, "efficiency": 0.89}))
    'K 1  noise scale 512  efficiency 89%'
    """
    parts = []
    if progress.time_s > 0:
        parts.append(f"{progress.updates / progress.time_s:,.0f} updates/s")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.record is not None and progress.record.test_accuracy is not None:
        parts.append(f"accuracy {progress.record.test_accuracy:.1%}")
    parts.append(f"K {progress.threshold}")
    if progress.staleness_mean is not None:
        parts.append(f"staleness {progress.staleness_mean:.1f}")
    # Goodput is known at evaluation points only, so it is that of the newest record.
    values = {**(progress.record.statistics if progress.record else {}), **progress.statistics}
    return "  ".join(
        [*parts, *(form.format(value) for key, form in _STATISTICS if (value := values.get(key)) is not None)]
    )


def clock(seconds: Seconds) -> str:
    """Return a duration as hours, minutes and seconds.

    >>> clock(7.6), clock(75), clock(7275)
    ('8 s', '1:15', '2:01:15')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def interrupted(signal: str, folder: Path | None) -> str:
    """Return the line about a run that a signal has asked to end.

    Args:
        signal: its name.
        folder: of the run's checkpoints; None: it has none.

    >>> interrupted("SIGTERM", None)
    'paceline: SIGTERM: training ends, the model is evaluated; a second Ctrl-C waits for neither workers nor evaluation'
    """
    name = "Ctrl-C" if signal == "SIGINT" else signal
    done = "evaluated" if folder is None else f"saved in {folder} and evaluated"
    second = "a second Ctrl-C waits for neither workers nor evaluation"
    return f"paceline: {name}: training ends, the model is {done}; {second}"


class LiveProgress:
    """Display of the newest :class:`Progress`, from ``with`` to the end of the block.

    Args:
        title: names the run.
        start: what workers do in the phase ``starting``, in a word.
        console: where to draw; stderr by default, so that results on stdout stay clean.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        title: str,
        start: str = "starting",
        *,
        console: Console | None = None,
        now: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._title, self._start = title, start
        self._now = now
        self._newest = Progress("starting", None)
        self._drawn_s = -REDRAW_S
        self._training_since_s: Seconds | None = None
        # Output of the program on stdout is drawn above the display only if both are the same screen.
        self._live = Live(
            console=console or Console(stderr=True), auto_refresh=False, redirect_stdout=sys.stdout.isatty()
        )

    def __enter__(self) -> "LiveProgress":
        self._live.start()
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()
        self._live.stop()

    def update(self, progress: Progress) -> None:
        """Take the newest state; draw it unless the last drawing is younger than ``REDRAW_S``."""
        # A new phase is always drawn: it may be long until the next update.
        entered = (progress.phase, progress.work) != (self._newest.phase, self._newest.work)
        self._newest = progress
        if self._training_since_s is None and progress.phase == "training":
            self._training_since_s = self._now()
        if entered or self._now() - self._drawn_s >= REDRAW_S:
            self._draw()

    def left_s(self) -> Seconds | None:
        """Return the wall time to the end of the budget at the rate so far; None as long as it is unknown."""
        fraction = self._newest.fraction
        if self._newest.phase != "training" or self._training_since_s is None or not fraction:
            return None
        return (self._now() - self._training_since_s) * (1 - min(fraction, 1.0)) / fraction

    def _draw(self) -> None:
        self._drawn_s = self._now()
        fraction, left_s = self._newest.fraction, self.left_s()
        phase = (self._newest.work or self._start) if self._newest.phase == "starting" else self._newest.phase
        row = Table.grid(padding=(0, 1))
        row.add_row(
            f"{phase:<8}",
            ProgressBar(total=1.0, completed=fraction or 0.0, pulse=fraction is None, width=32),
            "" if fraction is None else f"{min(fraction, 1.0):4.0%}",
            "" if left_s is None else f"{clock(left_s)} left",
        )
        remarks = [Text(remark, style="yellow") for remark in self._newest.remarks]
        self._live.update(
            Group(Text(self._title, style="bold"), row, Text(figures(self._newest)), *remarks), refresh=True
        )


@contextlib.contextmanager
def watcher(progress: bool | None, title: str, start: str = "starting") -> Iterator[Callable[[Progress], None]]:
    """Yield the function that takes each :class:`Progress`.

    Args:
        progress: True to draw; None to draw if stderr is a terminal, and else to write a line about what takes long
            before training; False for neither.
        title: names the run.
        start: what workers do before they train, in a word.
    """
    if sys.stderr.isatty() if progress is None else progress:
        with LiveProgress(title, start) as live:
            yield live.update
    elif progress is None:
        with SlowStart(title) as lines:
            yield lines.update
    else:
        yield lambda *_: None


class SlowStart:
    """Lines on stderr, in place of a display, about what takes long before training; a context manager.

    Args:
        title: names the run.
        after_s: time after which there is a line.
        say: prints one.
    """

    def __init__(self, title: str, after_s: Seconds = SLOW_S, say: Callable[[str], None] | None = None) -> None:
        self._title, self._after_s, self._say = title, after_s, say or functools.partial(print, file=sys.stderr)
        self._work, self._timer = "", threading.Timer(0.0, str)

    def __enter__(self) -> "SlowStart":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def update(self, progress: Progress) -> None:
        """Take the newest state; what is being done has begun if it is another than before."""
        if progress.work == self._work:
            return
        self._timer.cancel()
        self._work = progress.work
        if self._work:
            line = f"paceline: {self._title}: {self._work} takes longer than {self._after_s:g} s"
            self._timer = threading.Timer(self._after_s, self._say, [line])
            self._timer.daemon = True
            self._timer.start()


# (what is being measured, completed fraction of all measurements).
Report: TypeAlias = Callable[[str, float], None]


@contextlib.contextmanager
def measuring(progress: bool | None, title: str, *, line: str | None = None) -> Iterator[Report]:
    """Yield the function to call as measurements proceed; it draws under the same conditions as :func:`watcher`.

    Args:
        progress: as for :func:`watcher`.
        title: names what is measured.
        line: printed once on stderr, when the first measurement begins, where there is no terminal to draw on and
            ``progress`` is None.
    """
    if not (sys.stderr.isatty() if progress is None else progress):
        lines = [line] if line is not None and progress is None else []
        yield lambda *_: print(lines.pop(), file=sys.stderr) if lines else None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda step, done: bar.update(task, description=f"{title}: {step}", completed=done)
