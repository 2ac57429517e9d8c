import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paceline.comm import liveness


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that only a signal ends."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_zombie_is_not_alive(sleeper: "subprocess.Popen[bytes]") -> None:
    pidfd = liveness.open_pid(sleeper.pid)
    assert liveness.alive(pidfd)
    assert not liveness.wait_gone([pidfd], 0.001)
    liveness.kill(pidfd)
    assert liveness.wait_gone([pidfd], 60)
    assert not liveness.alive(pidfd)
    os.kill(sleeper.pid, 0)  # not reaped yet: here a pid would say that it lives
    sleeper.wait()
    liveness.kill(pidfd)  # nothing left to kill, and no other process is hit
    os.close(pidfd)


@pytest.mark.parametrize("missing", [[], ["pidfd_send_signal"]])
def test_kill_sends_the_signal_it_is_given(
    missing: list[str], sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing:
        monkeypatch.delattr(signal, name)
    pidfd = liveness.open_pid(sleeper.pid)
    liveness.kill(pidfd, signal.SIGTERM)
    assert liveness.describe_exit(sleeper.wait(60)) == "killed by SIGTERM"
    liveness.kill(pidfd, signal.SIGTERM)
    os.close(pidfd)


def test_wait_gone_waits_for_all(sleeper: "subprocess.Popen[bytes]") -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        pidfds = [liveness.open_pid(sleeper.pid), liveness.open_pid(other.pid)]
        other.kill()
        assert not liveness.wait_gone(pidfds, 0.2)
        sleeper.kill()
        assert liveness.wait_gone(pidfds, None)
    for pidfd in pidfds:
        os.close(pidfd)


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit code 0"), (86, "exit code 86"), (-9, "killed by SIGKILL"), (-40, "killed by signal 40")],
)
def test_exit_codes_in_words(code: int, text: str) -> None:
    assert liveness.describe_exit(code) == text


WATCHER = """
import os, signal, sys
from paceline.comm import liveness
if sys.argv[2] == "leader":
    os.setpgid(0, 0)
liveness.watch_and_exit(int(sys.argv[1]))
print("watching", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(("kind", "code"), [("leader", -signal.SIGKILL), ("member", liveness.ORPHANED)])
def test_a_watcher_leaves_with_the_watched(kind: str, code: int, sleeper: "subprocess.Popen[bytes]") -> None:
    pidfd = liveness.open_pid(sleeper.pid)
    command = [sys.executable, "-c", WATCHER, str(pidfd), kind]
    with subprocess.Popen(command, pass_fds=[pidfd], stdout=subprocess.PIPE) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == b"watching\n"
        assert watcher.poll() is None
        sleeper.kill()
        assert watcher.wait(60) == code
    os.close(pidfd)
