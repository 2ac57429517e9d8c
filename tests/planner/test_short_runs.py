"""Each kind of worker, run shortly, beside its pieces."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import InputError, WorkerError
from paceline.core.records import WorkerFigures
from paceline.engine.base import Job
from paceline.planner.base import Arrangement
from paceline.planner.program import short_runs as runs
from paceline.planner.program.closed_form import closed_plans, host_objectives, once
from paceline.planner.program.profile import Pieces, kind
from paceline.planner.program.profiling import profile
from paceline.planner.program.short_runs import alike, quickest, short_runs
from paceline.planner.search.objective import Objectives
from tests.planner.profiles import PROFILE
from tests.planner.test_probe import Branching, program


def test_of_each_kind_the_likely_best_is_run() -> None:
    found = quickest(program(), 2, PROFILE)
    assert {name: kind(plan.arrangement) for name, plan in found.items()} == {
        name: name for name in ("alone", "replicas", "stages", "shards")
    }
    for name, plan in found.items():
        assert plan.strategy is not None
        assert (plan.strategy.accumulate, plan.strategy.recompute) == (1, "none")
        workers = 1 if name == "alone" else 2
        assert plan.strategy.workers == workers
        every = closed_plans(program(), PROFILE, host_objectives(program(), Objectives(), 2), workers)
        others = [p for p in once(list(every)) if kind(p.arrangement) == name and not p.cost.staleness]
        assert plan.samples_per_s == max(other.samples_per_s for other in others)


def test_what_is_run_has_stages_that_are_alike() -> None:
    unlike = Arrangement(stages=2, stage_shards=(2, 1), shards=2, micro_batches=8, accumulated=2, micro_batch=2)
    assert alike(unlike) == Arrangement(stages=2, shards=2, micro_batches=8, micro_batch=2)
    assert alike(Arrangement(micro_batch=2, micro_batches=4, divided=1)) == Arrangement(micro_batch=8)


@pytest.mark.parametrize(("takes_s", "rounds"), [(1.0, runs.ROUNDS), (9.0, 3), (40.0, 1)])
def test_there_are_as_many_rounds_as_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, rounds: int
) -> None:
    times = iter([100.0, 100.0 + takes_s])
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(times))
    assert list(runs._rounds()) == [False, True, False, True, False][:rounds]


@pytest.mark.timeout(240.0)  # runs in processes that each import torch
def test_kinds_that_a_model_can_not_have_are_left_out() -> None:
    measured = profile(program(Branching, width=3, classes=3), 2, runs=False)
    found, refused = short_runs(program(Branching, width=3, classes=3), 2, measured)
    assert not refused  # nothing else was proposed
    assert set(found) == {"alone", "replicas"}
    for name, run in found.items():
        assert kind(run.arrangement) == name
        assert min(run.step_s, run.pieces.compute_s, run.closed_s, run.closed_compute_s) > 0
        assert run.beside_bytes > 0  # a process holds far more than twelve elements


class Engine:
    """Runs nothing; of stages it says that they can't be had."""

    interrupted = False

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None: ...

    def refuse(self, job: Job) -> None:
        if job.strategy.stage_count > 1:
            raise InputError("the model is one layer\nand more")

    def run(self, job: Job, tell: object) -> Any:
        figures = WorkerFigures(0, 0, 0, 3, 0.0, 0.25, None, 2**30, 0)
        return SimpleNamespace(account=SimpleNamespace(workers=[figures], interrupted=self.interrupted))


def test_a_kind_that_fails_says_why_and_the_others_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages fail at once, shards when their pieces are measured; of the others the shorter pieces count."""
    seen = set[str]()

    def pieces(job: Job, fork_server: object, busy: object) -> Pieces:
        if job.strategy.tensor_parallel:
            raise WorkerError("replica 0 died")
        disturbed = str(job.strategy) not in seen
        seen.add(str(job.strategy))
        return Pieces(0.2 if disturbed else 0.1, 0.0, 0.0, 1.0, 1.0)

    monkeypatch.setattr(runs, "LocalEngine", Engine)
    monkeypatch.setattr(runs.closed_form, "pieces_of", pieces)
    found, refused = short_runs(program(), 2, PROFILE)
    assert refused == {"stages": "the model is one layer", "shards": "replica 0 died"}
    assert {name: (run.step_s, run.pieces.compute_s) for name, run in found.items()} == {
        "alone": (0.25, 0.1), "replicas": (0.25, 0.1)
    }  # fmt: skip
    assert all(2**30 - 10**6 < run.beside_bytes < 2**30 for run in found.values())


def test_ctrl_c_ends_more_than_the_run_that_it_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "interrupted", True)
    monkeypatch.setattr(runs, "LocalEngine", Engine)
    with pytest.raises(KeyboardInterrupt):
        short_runs(program(), 2, PROFILE)
