"""What one engine needs does not grow with the runs that it carries."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from paceline import PacelineError, Run, WorkerError, compare, train
from paceline.comm.fork_server import ForkServer
from paceline.engine.local.engine import PRELOAD, SPMD, LocalEngine
from paceline.engine.local.fault_injection import EventScript
from tests.engine import programs
from tests.engine.local import moments
from tests.engine.local.leaks import files

Local = Callable[..., Run]


RUNS: dict[str, dict[str, Any]] = {
    "plain": {"strategy": "replicas=3"},
    "traced": {"strategy": "replicas=3 aggregation=asynchronous", "trace": True},
    "scored often": {"strategy": "replicas=2", "evaluate_every": 1},
    "killed": {"strategy": "replicas=3", "script": EventScript().kill(replica=1, step=2)},
    "hogwild": {"strategy": "replicas=2 aggregation=hogwild"},
}


@pytest.mark.parametrize("name", RUNS)
def test_files_do_not_pile_up(local: Local, name: str) -> None:
    settings = dict(RUNS[name])
    strategy = settings.pop("strategy")
    local(programs.program(), strategy, steps=4, **settings)
    before = files()
    for _ in range(3):
        local(programs.program(), strategy, steps=4, **settings)
    assert files() == before


def test_nor_where_runs_fail(local: Local) -> None:
    def loop(worker: Any) -> None:
        raise ValueError

    def fail() -> None:
        with pytest.raises(WorkerError):
            local(programs.program(), "replicas=3", steps=4, loop=loop)

    fail()
    before = files()
    for _ in range(3):
        fail()
    assert files() == before


def living(process: psutil.Process) -> list[int]:
    """Its children that still run; one that is reaped while it is looked at does not."""
    found: list[int] = []
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def test_processes_and_threads_neither(local: Local, engine: LocalEngine) -> None:
    local(programs.program(), "replicas=3", steps=4)
    assert engine._fork_server is not None
    server = psutil.Process(engine._fork_server.pid)
    assert living(server) == []
    threads = threading.active_count()
    local(programs.program(), "replicas=3", steps=4)
    assert psutil.Process(engine._fork_server.pid) == server
    assert threading.active_count() == threads
    assert len(os.listdir(f"/proc/{server.pid}/task")) == 1


def test_a_comparison_has_one_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = ForkServer.start

    def counted(preload: Any) -> ForkServer:
        started.append(preload)
        return start(preload)

    monkeypatch.setattr(ForkServer, "start", counted)
    strategies = ["replicas=2", "replicas=2 aggregation=asynchronous"]
    result = compare(programs.program(), strategies, engine="local", rounds=2, steps=4, progress=False)
    assert len(started) == 1
    assert len({run.summary["start_digest"] for runs in result.runs.values() for run in runs}) == 2  # one a round


def test_nor_do_runs_of_two_kinds_end_each_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports what the second one lacks, and goes on."""
    started, imported = list[set[str]](), list[list[str]]()

    class Recorded:
        alive = True

        def __init__(self, preload: tuple[str, ...]) -> None:
            started.append(set(preload))

        def begin_import(self, modules: list[str]) -> None:
            imported.append(modules)

        def close(self) -> None:
            pass

    monkeypatch.setattr(ForkServer, "start", Recorded)
    engine = LocalEngine()
    for wanted in (PRELOAD, SPMD, PRELOAD, SPMD):
        engine._fork_server_with(wanted)
    assert started == [set(PRELOAD)]
    assert imported == [[name for name in SPMD if name not in PRELOAD]]


def test_an_engine_by_name_is_closed_after_the_run() -> None:
    before = set(psutil.Process().children())
    train(programs.program(), "replicas=2", engine="local", steps=3, progress=False)
    assert set(psutil.Process().children()) == before


def test_two_engines_at_once() -> None:
    """Each from a thread of its own."""
    program, runs = programs.program(), {}

    def carry(name: str) -> None:
        with LocalEngine() as engine:
            runs[name] = train(program, "replicas=2", engine=engine, steps=20, progress=False)

    threads = [threading.Thread(target=carry, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [runs[name].summary["updates"] for name in ("a", "b")] == [20, 20]


def test_a_model_that_memory_cannot_hold_is_refused_with_nothing_left(local: Local) -> None:
    """Each of a thousand replicas would need a read slot and a Δ slot of 80 MB."""
    before = files()
    program = programs.program(model=moments.enormous)
    with pytest.raises(PacelineError, match="bytes of shared memory can't be had"):
        local(program, "replicas=1000", steps=3)
    assert files() == before
