"""Two hosts, as far as a machine can be two: network and process namespaces of their own, and a cable between."""

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import oracle
from tests.engine.distributed_cases import CASES, ROOT, STEPS, ended, kept
from tests.engine.local.commands import eventually
from tests.engine.test_distributed_parity import ROUNDING, assert_same

PORT = 29400
"""Nobody else is in the first host's namespace."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def hosts() -> Iterator[list[str]]:
    """Two network namespaces, 10.231.7.1 and 10.231.7.2; skips where they can't be had."""
    if shutil.which("ip") is None or shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root, ip and unshare")
    names = [f"paceline-{os.getpid()}-{i}" for i in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
            for i, name in enumerate(names, start=1):
                ip("-n", name, "addr", "add", f"10.231.7.{i}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine gives no network namespaces: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def torchrun_on(host: str, number: int, folder: Path) -> "subprocess.Popen[str]":
    launch = f"-m torch.distributed.run --nnodes 2 --node-rank {number} --nproc-per-node 1 --rdzv-backend static"
    where = ["--master-addr", "10.231.7.1", "--master-port", str(PORT)]
    script = Path(__file__).with_name("distributed_hosts_script.py")
    apart = ["ip", "netns", "exec", host, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.Popen(
        [*apart, sys.executable, *launch.split(), *where, str(script), str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_hosts_are_one_process_and_miss_each_other(tmp_path: Path) -> None:
    with hosts() as names:
        started = [torchrun_on(name, number, tmp_path) for number, name in enumerate(names)]
        try:
            said = ended(started[1])  # as its rank is killed; the other torchrun waits minutes for this one
            eventually((tmp_path / "killed.0").exists)
        finally:
            for process in started:
                process.kill()
                process.communicate()
    assert started[1].returncode == 1, said
    first, other = kept(tmp_path, "momentum", 2)
    assert_same(first["state"], oracle.one_process(CASES["momentum"].program, 2, STEPS), ROUNDING)
    assert first["history"] == other["history"]
    spans = kept(tmp_path, "traced", 2)[0]["spans"]
    summed = {(s.replica, s.step): s for s in spans if s.action == "all_reduce"}
    for step in range(1, STEPS + 1):
        one, two = summed[0, step], summed[1, step]
        # Nobody is summed with who has not come, but for the error of a clock: far below the 5 ms allowed here.
        assert min(one.end_ns, two.end_ns) > max(one.start_ns, two.start_ns) - 5e6
    kind, text = pickle.loads((tmp_path / "killed.0").read_bytes())
    assert kind == "WorkerError"
    assert text.startswith("rank 1 (process ")
    assert "was lost while rank 0" in text
