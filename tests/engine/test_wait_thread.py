"""Waits on a helper thread."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from paceline.engine.spmd.p2p import WaitThread
from tests.engine.distributed_cases import ended, torchrun


def test_a_wait_returns_the_result_and_may_time_out_first() -> None:
    thread, opened = WaitThread(), threading.Event()
    waiting = thread.begin(opened.wait)
    with pytest.raises(RuntimeError, match="not yet"):
        waiting.wait(timedelta(milliseconds=1))
    assert not waiting.is_completed()
    opened.set()
    assert waiting.wait()
    assert waiting.is_completed()


def test_an_error_of_a_wait_is_raised() -> None:
    def fails() -> None:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        WaitThread().begin(fails).wait()


def test_the_thread_ends_with_its_owner() -> None:
    before = set(threading.enumerate())
    thread = WaitThread()
    (started,) = set(threading.enumerate()) - before
    thread.begin(lambda: True).wait()
    del thread
    assert not started.is_alive()


@pytest.mark.timeout(180)
def test_a_process_may_end_before_its_threads(tmp_path: Path) -> None:
    """It was aborted by torch's own threads, once in a while in a whole run."""
    process = torchrun(Path(__file__).with_name("wait_thread_script.py"), ranks=2, folder=tmp_path)
    said = ended(process, within_s=120.0)
    assert process.returncode == 0, said
