"""Ray's own life: on one host it goes with the engine, however that ends; a cluster that is joined stays."""

import functools
import ipaddress
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline import InputError, train
from paceline.checkpoint import fingerprint
from paceline.comm import liveness
from paceline.engine.ray import actor_pool, cluster
from paceline.engine.ray.engine import RayEngine
from paceline.engine.ray.replica import ReplicaActor
from paceline.engine.server import messages
from tests.engine import programs
from tests.engine.local.commands import PATIENCE_S, eventually
from tests.engine.ray.commands import ENDLESS, TWO_NODES, started

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")


def listening(processes: list[psutil.Process]) -> set[str]:
    """The addresses at which these can be reached."""
    found = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert found
    return {address.removeprefix("::ffff:") for address in found}


def test_nothing_outlives_a_driver_that_is_killed_nor_is_reached_from_outside(short: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(ENDLESS, short, str(out)) as process:
        pidfds = []
        try:
            eventually(lambda: (out / "workers.json").exists() or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            family = psutil.Process(process.pid).children(recursive=True)
            pidfds = [liveness.open_pid(child.pid) for child in family]
            rows = json.loads((out / "workers.json").read_text())
            assert {r["pid"] for r in rows} <= {process.pid, *(child.pid for child in family)}
            assert all(ipaddress.ip_address(address).is_loopback for address in listening(family))
        finally:
            process.kill()
        assert liveness.wait_gone(pidfds, PATIENCE_S)
        eventually(lambda: not list(short.glob("ray-*")))
        assert not out.exists()
        assert [name for name in os.listdir("/dev/shm") if str(process.pid) in name] == []
        for pidfd in pidfds:
            os.close(pidfd)


def test_two_nodes(short: Path) -> None:
    with started(TWO_NODES, short) as process:
        try:
            out, err = process.communicate(timeout=110)
        finally:
            process.kill()
    assert process.returncode == 0, err
    said: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert said.pop("refused").startswith("this process is connected to a Ray already")
    assert said == {
        "nodes": 2,
        "updates": 5,
        "lanes": [-1, 0, 1],
        "in order": True,
        "left": ["its node was lost"],
        "the far one left": True,
        "went on": True,
        "connected": False,
        "still there": 1,
        "its GPUs count, not this host's": True,
        "its own connection stays": True,
    }


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("strategy", "match"),
    [
        ("replicas=2 aggregation=hogwild", "hogwild writes memory that replicas share.*; write engine=local"),
        ("replicas=2 device=cuda", "device=cuda, but torch sees none here; write device=cpu"),
        ("stages=2 schedule=pipedream", "by one version; write schedule=1f1b, or engine='local' or 'distributed'"),
        ("replicas=2 shards=2 shard_optimizer=true", "by engine='local' or 'distributed' alone, not by engine=ray"),
    ],
)
def test_what_it_cannot_carry(strategy: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        train(programs.program(), strategy, engine="ray", steps=1, progress=False)


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(InputError, match="engine=ray starts its own processes, but this one was started by torchrun"):
        train(programs.program(), engine="ray", steps=1, progress=False)


def test_virtual_time() -> None:
    with pytest.raises(InputError, match="engine=ray runs in real time; write engine='virtual'"):
        train(programs.program(), engine="ray", steps=1, times="compute=1", progress=False)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed; write pip install 'paceline\[ray\]', or engine='local'"):
        RayEngine()


def test_a_cluster_that_is_not_there(no_ray: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Others may have one on this machine.
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", functools.cache(set))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(InputError, match="engine='ray:auto': there is no Ray to join"):
        train(programs.program(), engine="ray:auto", steps=1, progress=False)


def test_a_cluster_of_another_python(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    told = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.10.2\n"
        "This process on 10.0.0.2 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )

    def init(*_: object, **__: object) -> None:
        raise RuntimeError(told)

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(
        InputError, match=r"started with: Ray: 2.60.0 Python: 3.10.2 This .* Python: 3.11.7; install the"
    ):
        train(programs.program(), engine="ray:10.0.0.1:6379", steps=1, progress=False)


def test_nodes_with_another_version(engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node that was there at the start; and of one that joined later, as its actor says for itself."""
    versions, assignment = fingerprint.versions(), messages.ReplicaAssignment(1, 0, 0, 0, 0)
    for name in ("version of Paceline", "version of torch"):
        monkeypatch.setattr(actor_pool, "versions", lambda other=name: versions | {other: "9.9"})
        engine.close()
        told = (
            rf"{name} is {re.escape(versions[name])} in node .* of the Ray cluster, but 9.9 in main; install the same"
        )
        with pytest.raises(InputError, match=told):
            train(programs.program(), "replicas=2", engine=engine, steps=1, progress=False)
        ended = ReplicaActor().run([], assignment, None, "", versions | {name: "9.9"})
        assert ended.failure is not None
        assert "but 9.9 in main" in ended.failure.decode()
    monkeypatch.undo()
    assert train(programs.program(), "replicas=2", engine=engine, steps=1, progress=False).summary["updates"] == 1


def test_a_node_without_paceline() -> None:
    error = cluster.missing_package(RuntimeError("ModuleNotFoundError: No module named 'paceline'"))
    assert error is not None
    assert "write pip install 'paceline[ray]' on every node" in str(error)
    assert cluster.missing_package(RuntimeError("No module named 'torch'")) is None


def test_signals_mean_what_they_meant(no_ray: None) -> None:
    before = signal.getsignal(signal.SIGTERM)
    environment, seen = dict(os.environ), list[int]()
    try:
        signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
        connection = cluster.Cluster(None)
        os.kill(os.getpid(), signal.SIGTERM)
        connection.close()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM] * 2
    assert dict(os.environ) == environment
