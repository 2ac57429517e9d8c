"""What is recorded is read back, whole spans only, whoever dies."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paceline.trace.recorder import AnyRecorder, NullRecorder, Recorder, read_packed
from paceline.trace.spans import ACTIONS, Span


@pytest.fixture
def sink() -> Iterator[int]:
    fd = os.memfd_create("spans")
    yield fd
    os.close(fd)


def test_what_is_recorded_is_read_back(sink: int) -> None:
    recorder = Recorder(replica=-1, stage=2, shard=3, sink=sink)
    expected = [
        Span(-1, 2, 3, action, 2**40 + step, step % 7, 2**60 + step, 2**60 + 2 * step, 2**35 * step)
        for step, action in enumerate(ACTIONS * 100)
    ]
    for each in expected:
        recorder.record(each.action, each.step, each.start_ns, each.end_ns, each.micro_batch, each.bytes)
    written = read_packed(sink)
    assert 0 < len(written) < len(expected)
    assert written == expected[: len(written)]
    recorder.close()
    assert read_packed(sink) == expected


def test_recording_goes_on_after_reading_and_closing(sink: int) -> None:
    recorder = Recorder(0, 0, 0, sink)
    recorder.record("forward", 1, 10, 20)
    recorder.close()
    recorder.close()
    assert len(read_packed(sink)) == 1
    recorder.record("wait", 1, 20, 30)
    recorder.close()
    assert [each.action for each in read_packed(sink)] == ["forward", "wait"]
    assert os.lseek(sink, 0, os.SEEK_CUR) == os.fstat(sink).st_size


@pytest.mark.parametrize("torn", [1, 20, 48])
def test_a_torn_tail_is_left_out(sink: int, torn: int) -> None:
    recorder = Recorder(0, 0, 0, sink)
    for step in range(3):
        recorder.record("apply", step, 0, 1)
    recorder.close()
    os.truncate(sink, os.fstat(sink).st_size - torn)
    assert [each.step for each in read_packed(sink)] == [0, 1]


def test_a_short_write_is_carried_on(sink: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    recorder = Recorder(0, 0, 0, sink)
    recorder.record("apply", 1, 0, 1)
    recorder.record("apply", 2, 1, 2)
    recorder.close()
    assert [each.step for each in read_packed(sink)] == [1, 2]


KILLED = """
import os, signal, sys
from paceline.trace.recorder import Recorder
recorder = Recorder(0, 0, 0, int(sys.argv[1]))
for step in range(2000):
    recorder.record("forward", step, step, step + 1)
signal.raise_signal(signal.SIGKILL)
"""


def test_spans_of_a_killed_writer_are_read(sink: int) -> None:
    worker = subprocess.run([sys.executable, "-c", KILLED, str(sink)], pass_fds=[sink], check=False)
    assert worker.returncode == -signal.SIGKILL
    steps = [each.step for each in read_packed(sink)]
    assert 1000 <= len(steps) < 2000
    assert steps == list(range(len(steps)))


def test_the_null_recorder_has_the_same_methods() -> None:
    public = {name for name in vars(Recorder) if not name.startswith("_")}
    assert public == {name for name in vars(NullRecorder) if not name.startswith("_")} == {"close", "record", "wait"}
    NullRecorder().record("wait", 1, 0, 1)
    NullRecorder().close()


@pytest.mark.parametrize("traced", [True, False])
def test_waits_are_counted_with_a_trace_or_without(sink: int, traced: bool) -> None:
    recorder: AnyRecorder = Recorder(2, 0, 0, sink) if traced else NullRecorder()
    recorder.record("forward", 1, 0, 3)
    recorder.wait(1, 3, 7, micro_batch=1)
    recorder.wait(1, 9, 10)
    recorder.close()
    assert recorder.waited_ns == 5
    waits = [Span(2, 0, 0, "wait", 1, 1, 3, 7, 0), Span(2, 0, 0, "wait", 1, 0, 9, 10, 0)]
    assert [span for span in read_packed(sink) if span.action == "wait"] == (waits if traced else [])
