"""Waits in a thread of their own."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from paceline.engine.spmd.p2p import WaitThread
from tests.engine.distributed_cases import ended, torchrun


def test_what_it_waits_for_is_what_comes_of_it() -> None:
    aside, opened = WaitThread(), threading.Event()
    waiting = aside.begin(opened.wait)
    with pytest.raises(RuntimeError, match="not yet"):
        waiting.wait(timedelta(milliseconds=1))
    assert not waiting.is_completed()
    opened.set()
    assert waiting.wait()
    assert waiting.is_completed()


def test_what_a_wait_raises_is_raised() -> None:
    def fails() -> None:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        WaitThread().begin(fails).wait()


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    aside = WaitThread()
    (thread,) = set(threading.enumerate()) - before
    aside.begin(lambda: True).wait()
    del aside
    assert not thread.is_alive()


@pytest.mark.timeout(180)
def test_a_process_may_end_before_it(tmp_path: Path) -> None:
    """It was aborted by torch's own threads, once in a while in a whole run."""
    process = torchrun(Path(__file__).with_name("aside_script.py"), ranks=2, folder=tmp_path)
    said = ended(process, within_s=120.0)
    assert process.returncode == 0, said
