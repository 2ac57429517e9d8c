"""Budgets, records, spans, loops and delays on actors, as on the local engine."""

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from paceline import Run
from paceline.aggregation import Aggregation
from paceline.core.registry import family_of
from paceline.datasets import load_program
from paceline.engine.ray.engine import RayEngine
from paceline.engine.ray.server_client import ServerClient
from tests.engine import programs

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]


def test_epochs_are_passes_over_the_data(on_ray: OnRay) -> None:
    run = on_ray(programs.program(), "replicas=2", epochs=2)
    assert (run.summary["steps"], run.summary["updates"]) == (14, 14)  # 50 = 6 · 8 + 2


def test_seconds_end_a_run_with_what_there_is(on_ray: OnRay) -> None:
    run = on_ray(
        programs.program(test=programs.data()), "replicas=2 aggregation=asynchronous", seconds=0.4, evaluate_every=0.1
    )
    assert run.summary["seconds"] == 0.4
    assert [r.time_s for r in run.history] == sorted(r.time_s for r in run.history)
    assert run.history[-1].time_s == 0.4
    assert run.history[-1].updates == run.summary["updates"] > 0
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]


def test_a_condition_ends_a_run(on_ray: OnRay) -> None:
    run = on_ray(programs.program(), "replicas=2", steps=10**6, until="updates>=5", evaluate_every=1)
    assert 5 <= run.summary["updates"] < 10**6
    assert any(record.updates >= 5 for record in run.history)


def test_history_is_scored_at_the_asked_points(on_ray: OnRay) -> None:
    run = on_ray(programs.program(test=programs.data()), "replicas=3", steps=8, evaluate_every=2)
    assert [record.updates for record in run.history] == [0, 2, 4, 6, 8]
    assert all(0 <= record.test_accuracy <= 1 for record in run.history if record.test_accuracy is not None)
    assert run.history[-1].train_loss is not None
    assert run.history[0].test_loss is not None


def test_spans_lie_on_one_clock(on_ray: OnRay) -> None:
    run = on_ray(programs.program(), "replicas=2", steps=5, trace=True)
    assert {s.action for s in run.spans} >= {"forward", "backward", "push", "pull", "wait", "apply"}
    assert {s.replica for s in run.spans} == {-1, 0, 1}
    applied = [s for s in run.spans if s.action == "apply"]
    assert [s.step for s in applied] == [1, 2, 3, 4, 5]
    pushes = [s for s in run.spans if s.action == "push"]
    assert all(push.start_ns < applied[push.step - 1].end_ns for push in pushes)
    assert all(s.end_ns > 0 for s in run.spans)


def test_the_summary_has_a_hosts_figures(on_ray: OnRay) -> None:
    program = programs.program(optimizer=functools.partial(SGD, lr=0.1, momentum=0.9))
    run = on_ray(program, "replicas=2", steps=6)
    size = 4 * sum(p.numel() for p in run.model.parameters()) * 2  # float64
    assert run.summary["parameter_bytes"] == [size, size]
    assert run.summary["payload_bytes_per_step"] == run.summary["payload_formula_bytes_per_step"] == 4 * size
    assert all(0 < share <= 1 for share in run.summary["utilisation"])
    assert all(peak > 10**6 for peak in run.summary["peak_memory_bytes"])
    assert run.summary["step_time_s"] > 0
    assert run.summary["optimizer_bytes"] == [0, 0]
    assert run.summary["notes"]["server_optimizer_bytes"] == size  # momentum


def test_training_begins_once_all_replicas_are_built(
    on_ray: OnRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long to build takes nothing of a budget in seconds."""
    begun, call = list[int](), ServerClient.call

    def noted(server: ServerClient, method: str, *args: Any) -> Any:
        if method == "begin":
            begun.append(time.monotonic_ns())
        return call(server, method, *args)

    monkeypatch.setattr(ServerClient, "call", noted)

    def built() -> nn.Module:
        model = programs.program().build()
        (tmp_path / f"built-{os.getpid()}").write_text(str(time.monotonic_ns()))
        return model

    def loop(worker: Any) -> None:
        (tmp_path / f"replica-{worker.replica}").write_text((tmp_path / f"built-{os.getpid()}").read_text())
        for batch in worker.batches():
            worker.step(batch)

    on_ray(programs.program(model=built), "replicas=2", steps=2, loop=loop)
    assert all(int((tmp_path / f"replica-{replica}").read_text()) < begun[0] for replica in range(2))


def test_loops_of_ones_own_written_where_they_are_used(on_ray: OnRay) -> None:
    def loop(worker: Any) -> None:
        for k, batch in enumerate(worker.batches()):
            if worker.replica == 1 and k == 2:
                return
            worker.step(batch)

    program = programs.program(model=lambda: nn.Linear(6, 3).double())
    run = on_ray(program, "replicas=3", steps=6, loop=loop)
    assert run.left == []
    assert (run.summary["updates"], run.summary["gradients"]) == (6, 14)


def test_a_loop_that_makes_no_step(on_ray: OnRay) -> None:
    run = on_ray(programs.program(), "replicas=2", steps=6, loop=lambda worker: None)
    assert (run.summary["updates"], run.left) == (0, [])


LONG = "fraction=0.34 constant:value=1000"


def test_a_cancelled_replica_leaves_its_delay(on_ray: OnRay) -> None:
    """A thousand seconds: whoever waits for the end of it is not called off a second time."""
    run = on_ray(programs.program(), "replicas=3 aggregation=buffered:k=2,cancel=true", seconds=1, delay=LONG)
    assert run.summary["cancelled"] >= 2
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]
    assert run.summary["applied"] == 2 * run.summary["updates"]
    assert run.summary["discarded"] <= 1, "the slow one has pushed nothing; time may end with a Δ in the buffer"


def test_the_end_of_time_too(on_ray: OnRay) -> None:
    run = on_ray(programs.program(), "replicas=3 aggregation=asynchronous", seconds=0.3, delay=LONG)
    assert run.left == []
    assert run.summary["updates"] > 0


def test_data_are_mapped_not_copied(on_ray: OnRay) -> None:
    """200 MB: three replicas that had copies of their own would each show them."""
    inputs = torch.zeros(50, 500_000, dtype=torch.float64)
    program = programs.program(
        model=lambda: nn.Linear(500_000, 3, bias=False).double(), train=(inputs, torch.zeros(50, dtype=torch.int64))
    )
    run = on_ray(program, "replicas=3", steps=1)
    alone = max(on_ray(programs.program(), "replicas=3", steps=1).summary["peak_memory_bytes"])
    assert max(run.summary["peak_memory_bytes"]) - alone < 200e6


def test_the_roster_is_there_while_the_run_lasts(on_ray: OnRay, tmp_path: Path, engine: RayEngine) -> None:
    out = tmp_path / "run"

    def loop(worker: Any) -> None:
        for batch in worker.batches():
            if worker.replica == 0 and (out / "workers.json").exists():
                (tmp_path / "seen.json").write_bytes((out / "workers.json").read_bytes())
            worker.step(batch)

    on_ray(programs.program(), "replicas=2", steps=3, loop=loop, out=out)
    rows = json.loads((tmp_path / "seen.json").read_text())
    assert [(r["role"], r.get("replica")) for r in rows] == [
        ("main", None), ("coordinator", None), ("scorer", None), ("replica", 0), ("replica", 1)
    ]  # fmt: skip
    assert len({row["pid"] for row in rows}) == 5
    assert not (out / "workers.json").exists()
    assert (out / "summary.json").exists() or list(out.iterdir())


POLICY = """
from dataclasses import dataclass
from paceline import Aggregation, Apply, Discard, Release, register
from paceline.datasets import load_program

EVERY = 2

@register("every-other")
@dataclass(frozen=True)
class EveryOther(Aggregation[int]):
    "Applies the first Δ, drops the second, and so on."

    def start(self, replicas):
        return 0

    def arrived(self, state, arrival):
        fate = Discard((arrival,)) if state % EVERY else Apply(((arrival, 1.0),))
        return state + 1, (fate, Release((arrival.replica,)))

    def left(self, state, replica, reason):
        return state, ()

    def joined(self, state, replica):
        return state, ()

    def waits_for(self, state):
        return 1

program = load_program("digits")
"""


@pytest.fixture
def own_policy(tmp_path: Path) -> Iterator[Path]:
    """A file with a program and a policy that nobody else knows; forgotten again."""
    (tmp_path / "own.py").write_text(POLICY, encoding="utf-8")
    yield tmp_path / "own.py"
    kind = family_of(Aggregation)
    assert kind is not None
    kind.entries.pop("every-other", None)


def test_a_policy_of_a_users_own_file_decides(on_ray: OnRay, own_policy: Path) -> None:
    """No actor can import the file: the class travels with the job."""
    run = on_ray(load_program(f"{own_policy}:program"), "replicas=2 aggregation=every-other", steps=5)
    assert (run.summary["applied"], run.summary["discarded"]) == (5, 5)


def test_in_another_thread(on_ray: OnRay) -> None:
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(on_ray(programs.program(), "replicas=2", steps=3)))
    thread.start()
    thread.join()
    assert [run.summary["updates"] for run in runs] == [3]
