import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from comm_entries import Pipe

from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer
from paceline.core.errors import InputError, PacelineError

HERE = str(Path(__file__).parent)


def ended(fork_server: ForkServer, pid: int) -> str | None:
    """How a child ended, once it has."""
    assert liveness.wait_gone([fork_server._children[pid].pidfd], 60)
    return fork_server.status(pid)


ENDLESS = """
import os, signal
with open("/proc/{main}/fd/{fd}", "w") as pipe:
    pipe.write(str(os.getpid()) + "\\n")
while True:
    signal.pause()
"""


@pytest.fixture
def endless(pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """A module ``endless_import`` whose import says that it has begun and never ends."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "endless_import.py").write_text(ENDLESS.format(main=os.getpid(), fd=pipe.fd))
    monkeypatch.syspath_prepend(folder)
    return pipe


# ------------------------------------------------------------------------------------------------------------ children


@pytest.mark.parametrize(
    ("args", "status"),
    [
        ({"code": None}, "exit code 0"),
        ({"code": 3}, "exit code 3"),
        ({}, "exit code 1"),
        ({"signal": signal.SIGTERM}, "killed by SIGTERM"),
        ({"signal": signal.SIGKILL}, "killed by SIGKILL"),
    ],
)
def test_status_says_how_a_child_ended(fork_server: ForkServer, args: dict[str, Any], status: str) -> None:
    child = fork_server.spawn("comm_entries:fail", args)
    assert ended(fork_server, child.pid) == status
    assert fork_server.status(child.pid) == status


def test_kill_minus_nine_from_outside(fork_server: ForkServer) -> None:
    child = fork_server.spawn("comm_entries:hang", {})
    assert fork_server.status(child.pid) is None
    os.kill(child.pid, signal.SIGKILL)
    assert ended(fork_server, child.pid) == "killed by SIGKILL"


def test_arguments_and_descriptors_arrive(fork_server: ForkServer, pipe: Pipe) -> None:
    args = {"text": "Δ", "list": [1, 2.5, None], "size": "x" * 50_000}
    fork_server.spawn("comm_entries:echo", args, [pipe.fd])
    assert pipe.read() == args


def test_a_child_is_a_clean_process(fork_server: ForkServer, pipe: Pipe) -> None:
    fork_server.spawn("comm_entries:hang", {})
    fork_server.spawn("comm_entries:inspect", {"main": os.getpid()}, [pipe.fd])
    said = pipe.read()
    assert said["sockets"] == []
    assert said["epolls"] == []
    assert said["pidfds"] in (0, 1)  # main's; before Linux 6.9 a pidfd has no name of its own
    assert said["sigint"]
    assert said["sigterm"]
    assert said["leads_group"]
    assert not said["session_of_main"]
    assert said["main_file"].endswith("fork_server_main.py")
    assert said["path"] == [entry or os.getcwd() for entry in sys.path]
    assert said["pythonpath"] == os.environ.get("PYTHONPATH")


def test_the_fork_server_forks_with_one_thread(fork_server: ForkServer) -> None:
    fork_server.spawn("comm_entries:nothing", {})
    assert len(os.listdir(f"/proc/{fork_server.pid}/task")) == 1


def test_what_cannot_be_sent_leaves_the_nursery_whole(fork_server: ForkServer, pipe: Pipe) -> None:
    with pytest.raises(InputError, match=r"arguments of 4,000,\d+ bytes with 0 file descriptors .*share\(\)"):
        fork_server.spawn("comm_entries:echo", {"text": "x" * 4_000_000})
    with pytest.raises(InputError, match="with 300 file descriptors"):
        fork_server.spawn("comm_entries:echo", {}, [pipe.fd] * 300)
    fork_server.spawn("comm_entries:echo", {"a": 1}, [pipe.fd])
    assert pipe.read() == {"a": 1}


def test_threads_may_spawn_at_once(fork_server: ForkServer, pipe: Pipe) -> None:
    def spawn(i: int) -> None:
        fork_server.spawn("comm_entries:echo", {"i": i}, [pipe.fd])

    threads = [threading.Thread(target=spawn, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pipe.read()["i"] for _ in range(8)) == list(range(8))


def test_an_answer_that_nobody_waited_for_is_passed_over(fork_server: ForkServer, pipe: Pipe) -> None:
    fork_server.wait_ready()
    fork_server._link.send(b'{"id": -1, "do": "spawn", "entry": "comm_entries:nothing", "args": {}, "path": []}')
    fork_server.spawn("comm_entries:echo", {"a": 1}, [pipe.fd])
    assert pipe.read() == {"a": 1}


def test_a_main_without_free_descriptors_is_told(fork_server: ForkServer) -> None:
    fork_server.wait_ready()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), limit[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        with pytest.raises(PacelineError, match="too many open files"):
            fork_server.spawn("comm_entries:nothing", {})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for fd in taken:
            os.close(fd)


# ------------------------------------------------------------------------------------------------- ends and breakdowns


def test_close_leaves_no_process_zombie_or_descriptor(pipe: Pipe) -> None:
    before = os.listdir("/proc/self/fd")
    processes = psutil.Process().children()
    fork_server = ForkServer.start([])
    children = [fork_server.spawn("comm_entries:hang", {}) for _ in range(3)]
    fork_server.spawn("comm_entries:hang_with_helper", {}, [pipe.fd])
    helper = liveness.open_pid(pipe.read())
    pids = [fork_server.pid, *(child.pid for child in children)]
    fork_server.close()
    fork_server.close()
    assert liveness.wait_gone([helper], 60)
    os.close(helper)
    assert psutil.Process().children() == processes
    assert not any(psutil.pid_exists(pid) for pid in pids)  # a zombie would exist
    assert os.listdir("/proc/self/fd") == before


def test_a_forgotten_nursery_closes_itself() -> None:
    fork_server = ForkServer.start([])
    pidfds = [liveness.open_pid(fork_server.pid), os.dup(fork_server.spawn("comm_entries:hang", {}).pidfd)]
    del fork_server
    gc.collect()
    assert liveness.wait_gone(pidfds, 0)
    for pidfd in pidfds:
        os.close(pidfd)


def test_close_does_not_wait_for_the_imports(endless: Pipe) -> None:
    fork_server = ForkServer.start(["endless_import"])
    pid = endless.read()
    assert pid == fork_server.pid
    fork_server.close()
    assert not psutil.pid_exists(pid)


def test_a_failed_import_is_told_with_its_traceback() -> None:
    fork_server = ForkServer.start(["no_such_module"])
    with pytest.raises(PacelineError, match=r"(?s)Traceback.*No module named 'no_such_module'"):
        fork_server.spawn("comm_entries:nothing", {})
    with pytest.raises(PacelineError, match="exit code 1"):
        fork_server.spawn("comm_entries:nothing", {})
    fork_server.close()


def test_children_live_on_without_the_fork_server(bare: ForkServer, pipe: Pipe) -> None:
    hanging = bare.spawn("comm_entries:hang", {}, [pipe.fd])
    assert pipe.read() == hanging.pid
    other = bare.spawn("comm_entries:hang", {})
    server = liveness.open_pid(bare.pid)
    os.kill(bare.pid, signal.SIGKILL)
    assert liveness.wait_gone([server], 60)
    os.close(server)
    with pytest.raises(PacelineError, match=r"fork server .*killed by SIGKILL.*live on"):
        bare.spawn("comm_entries:hang", {})
    assert not liveness.wait_gone([hanging.pidfd], 0.3)
    assert bare.status(hanging.pid) is None
    liveness.kill(other.pidfd)
    assert ended(bare, other.pid) == "ended, its status lost with the fork server"
    left = os.dup(hanging.pidfd)
    bare.close()
    assert liveness.wait_gone([left], 0)
    os.close(left)


# ------------------------------------------------------------------------------------------------ main, in all its ways

# No guard: were it imported again, it would start again.
SCRIPT = """
import json, os, sys
sys.path.append({here!r})
from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer
os.write({fd}, b'"started"\\n')
fork_server = ForkServer.start([])
child = fork_server.spawn("comm_entries:speak", {{"text": "from the child"}}, [{fd}])
assert liveness.wait_gone([child.pidfd], 60)
assert fork_server.status(child.pid) == "exit code 0", fork_server.status(child.pid)
"""


@pytest.mark.parametrize("way", ["file", "-c", "stdin"])
def test_main_needs_no_guard(way: str, pipe: Pipe, tmp_path: Path) -> None:
    script = SCRIPT.format(here=HERE, fd=pipe.fd)
    file = tmp_path / "unguarded.py"
    file.write_text(script)
    arguments = {"file": [str(file)], "-c": ["-c", script], "stdin": ["-"]}[way]
    result = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        input=script if way == "stdin" else "",
        pass_fds=[pipe.fd],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "from the child", "")
    assert [pipe.read(), pipe.read()] == ["started", "spoken"]


FORKING = """
import os, sys
sys.path.append({here!r})
from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer
fork_server = ForkServer.start([])
child = fork_server.spawn("comm_entries:hang", {{}})
if os.fork() == 0:
    fork_server.close()
    sys.exit()
os.wait()
assert not liveness.wait_gone([child.pidfd], 0.3)
"""


def test_a_fork_of_main_closes_nothing() -> None:
    subprocess.run([sys.executable, "-c", FORKING.format(here=HERE)], timeout=60, check=True)


DYING = """
import os, sys, threading
sys.path[:0] = {path!r}
from paceline.comm.fork_server import ForkServer
fork_server = ForkServer.start({preload})
os.write({fd}, b"%d\\n" % fork_server.pid)
for entry in {entries}:
    child = fork_server.spawn("comm_entries:" + entry, {{}}, [{fd}])
    os.write({fd}, b"%d\\n" % child.pid)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("preload", "entries"),
    [
        pytest.param([], ["hang", "hang", "hang"], id="children"),
        pytest.param([], ["hang_deaf"], id="deaf child"),
        pytest.param([], ["hang_with_helper"], id="child with a process of its own"),
        pytest.param(["endless_import"], [], id="during the imports"),
    ],
)
def test_all_end_when_main_is_killed(preload: list[str], entries: list[str], endless: Pipe, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    path = [HERE, str(tmp_path / "modules")]
    code = DYING.format(path=path, preload=preload, entries=entries, fd=endless.fd)
    command = [sys.executable, "-c", code]
    main = subprocess.Popen(command, pass_fds=[endless.fd], env=os.environ | {"TMPDIR": str(files)})
    pids = {endless.read() for _ in range(1 + len(preload) + 2 * len(entries))}  # the server; each child and its word
    pidfds = [liveness.open_pid(pid) for pid in pids]
    assert all(liveness.alive(pidfd) for pidfd in pidfds)
    main.kill()
    assert main.wait(60) == -signal.SIGKILL
    assert liveness.wait_gone(pidfds, 5.0)
    for pidfd in pidfds:
        os.close(pidfd)
    assert list(files.iterdir()) == []
    assert [name for name in os.listdir("/dev/shm") if "paceline" in name or str(main.pid) in name] == []


def test_children_without_a_fork_server_end_with_main_too(endless: Pipe) -> None:
    code = DYING.format(path=[HERE], preload=[], entries=["hang", "hang_with_helper"], fd=endless.fd)
    main = subprocess.Popen([sys.executable, "-c", code], pass_fds=[endless.fd])
    server, *pids = (endless.read() for _ in range(5))
    server_pidfd, *pidfds = (liveness.open_pid(pid) for pid in (server, *set(pids)))
    liveness.kill(server_pidfd)
    assert liveness.wait_gone([server_pidfd], 60)
    assert not liveness.wait_gone(pidfds[:1], 0.3)
    main.kill()
    main.wait(60)
    assert liveness.wait_gone(pidfds, 5.0)
    for pidfd in (server_pidfd, *pidfds):
        os.close(pidfd)


SPAWNING = """
import sys
sys.path[:0] = {path!r}
from paceline.comm.fork_server import ForkServer
fork_server = ForkServer.start([])
while True:
    fork_server.spawn("comm_entries:hang", {{}}, [{fd}])
"""


@pytest.mark.parametrize("after", [1, 2, 5])
def test_main_killed_in_the_midst_of_spawning(after: int) -> None:
    pipe = Pipe()
    code = SPAWNING.format(path=[HERE], fd=pipe.fd)
    main = subprocess.Popen([sys.executable, "-c", code], pass_fds=[pipe.fd])
    os.close(pipe.fd)
    for _ in range(after):
        pipe.read()
    main.kill()
    main.wait(60)
    assert pipe.ends(5.0), "a child still holds the pipe"
    os.close(pipe.end)
