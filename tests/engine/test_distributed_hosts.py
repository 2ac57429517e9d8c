"""Two hosts, as far as a machine can be two: network and process namespaces of their own, and a cable between."""

import pickle
import subprocess
import sys
from pathlib import Path

import torch

from tests import oracle
from tests.engine.distributed_cases import CASES, ROOT, STEPS, ended, kept
from tests.engine.local.commands import eventually
from tests.engine.served_cases import SPANNING
from tests.engine.test_distributed_parity import ROUNDING, assert_same
from tests.namespaces import Host, two_hosts

PORT = 29400
"""Nobody else is in the first host's namespace."""


def torchrun_on(host: Host, first: Host, number: int, folder: Path) -> "subprocess.Popen[str]":
    launch = f"-m torch.distributed.run --nnodes 2 --node-rank {number} --nproc-per-node 1 --rdzv-backend static"
    where = ("--master-addr", first.address, "--master-port", str(PORT))
    script = Path(__file__).with_name("distributed_hosts_script.py")
    return subprocess.Popen(
        host.command(sys.executable, *launch.split(), *where, script, folder, own_pids=True),
        env=host.environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_hosts_are_one_process_and_miss_each_other(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        started = [torchrun_on(host, hosts[0], number, tmp_path) for number, host in enumerate(hosts)]
        try:
            said = ended(started[1])  # as its rank is killed; the other torchrun waits minutes for this one
            eventually((tmp_path / "killed.0").exists)
        finally:
            for process in started:
                process.kill()
                process.communicate()
    assert started[1].returncode == 1, said
    first, other = kept(tmp_path, "momentum", 2)
    [exit], (kind, text) = kept(tmp_path, "leaving", 2)
    assert (exit.replica, kind) == (1, "WorkerError")
    assert "was asked to end by SIGTERM" in exit.reason
    assert "rank 1 was asked to end by SIGTERM; the others go on without it" in text
    for model in kept(tmp_path, "served", 2):
        oracle.assert_same(model, oracle.one_process(CASES["momentum"].program, 2, STEPS), ROUNDING)
    for team in SPANNING:
        for model in kept(tmp_path, team, 2):
            oracle.assert_same(model, oracle.one_process(CASES["momentum"].program, 1, STEPS), ROUNDING)
    for cut, whole in kept(tmp_path, "kept", 2):
        assert all(torch.equal(value, whole[name]) for name, value in cut.items())
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
