"""The live display: what it says, how often it draws, and that it keeps off stdout."""

import io
import queue
import sys
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.core.records import Record
from paceline.engine.base import Progress
from paceline.progress import REDRAW_S, LiveProgress, SlowStart, clock, figures, interrupted, measuring, watcher

TRAINING = Progress("training", 0.25, time_s=2.0, updates=1000, gradients=3000, threshold=3)
RECORD = Record(2.0, 1000, 3000, 3, 4.0, 0.5, 0.6, 0.931)


class Hand:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


def screen() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def drawn(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (Progress("starting", None), "K 1"),
        (TRAINING, "500 updates/s  K 3"),
        (replace(TRAINING, loss=0.12345), "500 updates/s  loss 0.1235  K 3"),
        (replace(TRAINING, record=RECORD), "500 updates/s  accuracy 93.1%  K 3"),
        (replace(TRAINING, record=replace(RECORD, test_accuracy=None)), "500 updates/s  K 3"),
        (replace(TRAINING, staleness_mean=6.25), "500 updates/s  K 3  staleness 6.2"),
    ],
)
def test_figures_say_what_is_known(progress: Progress, expected: str) -> None:
    assert figures(progress) == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_display_shows_title_phase_share_and_time_left() -> None:
    console, hand = screen(), Hand()
    with LiveProgress("replicas=4", console=console, now=hand) as live:
        live.update(replace(TRAINING, fraction=0.0))
        hand.time_s += 3.0
        live.update(TRAINING)
        assert live.left_s() == pytest.approx(9.0)
    text = drawn(console)
    for expected in ("replicas=4", "starting", "training", "25%", "9 s left", "500 updates/s"):
        assert expected in text


def test_the_display_says_what_workers_do_before_they_train() -> None:
    console = screen()
    with LiveProgress("replicas=4 compile=true", "compiling", console=console, now=Hand()) as live:
        live.update(Progress("starting", 0.5))
        assert "compiling" in drawn(console)
        assert "starting" not in drawn(console)


@pytest.mark.parametrize("progress", [Progress("starting", None), replace(TRAINING, fraction=None)])
def test_time_left_is_unknown_before_training_and_without_a_bound(progress: Progress) -> None:
    with LiveProgress("x", console=screen(), now=Hand()) as live:
        live.update(progress)
        assert live.left_s() is None


def test_scoring_shows_no_time_left() -> None:
    hand = Hand()
    with LiveProgress("x", console=screen(), now=hand) as live:
        live.update(TRAINING)
        hand.time_s += 1.0
        live.update(replace(TRAINING, phase="scoring"))
        assert live.left_s() is None


def test_it_draws_no_oftener_than_it_may() -> None:
    console, hand = screen(), Hand()
    with LiveProgress("x", console=console, now=hand) as live:
        live.update(TRAINING)
        before = drawn(console)
        for loss in range(1000):
            hand.time_s += REDRAW_S / 2000
            live.update(replace(TRAINING, loss=float(loss)))
        assert drawn(console) == before
        hand.time_s += REDRAW_S
        live.update(replace(TRAINING, loss=7.0))
        assert "loss 7.0000" in drawn(console)[len(before) :]


def test_a_new_phase_is_drawn_at_once_and_the_newest_state_at_the_end() -> None:
    console = screen()
    with LiveProgress("x", console=console, now=Hand()) as live:
        live.update(TRAINING)
        live.update(replace(TRAINING, phase="scoring"))
        assert "scoring" in drawn(console)
        live.update(replace(TRAINING, phase="scoring", loss=3.0))
        assert "loss 3.0000" not in drawn(console)
    assert "loss 3.0000" in drawn(console)


@pytest.mark.parametrize("progress", [None, False])
def test_nothing_is_drawn_where_stderr_is_no_terminal_or_unasked(
    progress: bool | None, capfd: pytest.CaptureFixture[str]
) -> None:
    with watcher(progress, "x") as watch:
        watch(TRAINING)
    assert capfd.readouterr() == ("", "")


def test_asked_for_it_draws_on_stderr_and_leaves_stdout_to_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    with watcher(True, "replicas=4") as watch:
        watch(TRAINING)
        print("from the program")
    out, err = capfd.readouterr()
    assert out == "from the program\n"
    assert "replicas=4" in err
    assert "training" in err


def test_an_error_inside_passes_through_and_ends_the_display() -> None:
    console = screen()
    with pytest.raises(ZeroDivisionError), LiveProgress("x", console=console, now=Hand()):
        raise ZeroDivisionError
    assert drawn(console).endswith("\x1b[?25h"), "the cursor is shown again"


def test_measurements_without_a_terminal_are_one_line_and_none_if_unasked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    with measuring(None, "digits: planning", line="digits: measured here") as report:
        assert capsys.readouterr().err == "", "a profile that is kept needs no measurement"
        report("a first step", 0.0)
        report("short runs", 0.5)
    assert capsys.readouterr() == ("", "digits: measured here\n")
    for progress, line in ((False, "digits: measured here"), (None, None)):
        with measuring(progress, "digits: planning", line=line) as report:
            report("a first step", 0.0)
    assert capsys.readouterr() == ("", "")


def test_the_display_shows_what_is_being_done_before_training() -> None:
    console, hand = screen(), Hand()
    with LiveProgress("stages=2", console=console, now=hand) as live:
        live.update(Progress("starting", None, work="capturing"))
        live.update(Progress("starting", None, work="cutting stages"))
    assert "capturing" in drawn(console)
    assert "cutting stages" in drawn(console)


def test_without_a_display_there_is_a_line_about_what_takes_long() -> None:
    lines = queue.Queue[str]()
    with SlowStart("gpt2: stages=2", 0.0, lines.put) as start:
        start.update(Progress("starting", None, work="capturing"))
        assert lines.get(timeout=60) == "paceline: gpt2: stages=2: capturing takes longer than 0 s"
    with SlowStart("gpt2: stages=2", 600.0, lines.put) as start:
        start.update(Progress("starting", None, work="capturing"))
        start.update(Progress("training", 0.1))
        assert not start._timer.is_alive() or start._timer.finished.is_set()
    assert lines.empty()


def test_a_line_from_another_thread_stands_above_the_display() -> None:
    """As the one about Ctrl-C does, which is printed on stderr: it may not be drawn over."""
    console = screen()
    with LiveProgress("digits", console=console) as live:
        live.update(TRAINING)
        thread = threading.Thread(target=print, args=(interrupted("SIGINT", None),), kwargs={"file": sys.stderr})
        thread.start()
        thread.join()
        live.update(replace(TRAINING, phase="scoring"))
    text = drawn(console)
    assert text.count("paceline: Ctrl-C: training ends") == 1
    assert text.index("training ") < text.index("paceline: Ctrl-C") < text.index("scoring ")
