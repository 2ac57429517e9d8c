"""Each kind of worker, run shortly, beside its pieces."""

import pytest

from paceline.plan.host.profile import kind
from paceline.plan.host.profiling import profile
from paceline.plan.host.short_runs import plainest, short_runs
from tests.plan.profiles import PROFILE
from tests.plan.test_probe import Branching, program


def test_of_each_kind_a_plain_one_is_run() -> None:
    found = plainest(program(), 2, PROFILE)
    assert {name: kind(plan.arrangement) for name, plan in found.items()} == {
        name: name for name in ("alone", "replicas", "stages", "shards")
    }
    for name, plan in found.items():
        assert plan.strategy is not None
        assert (plan.strategy.schedule, plan.strategy.accumulate, plan.strategy.recompute) == ("1f1b", 1, "none")
        assert plan.strategy.workers == (1 if name == "alone" else 2)


@pytest.mark.timeout(240.0)  # runs in processes that each import torch
def test_kinds_that_a_model_can_not_have_are_left_out() -> None:
    measured = profile(program(Branching, width=3, classes=3), 2, runs=False)
    found = short_runs(program(Branching, width=3, classes=3), 2, measured)
    assert set(found) == {"alone", "replicas"}
    for name, run in found.items():
        assert kind(run.arrangement) == name
        assert min(run.step_s, run.pieces.compute_s, run.closed_s, run.closed_compute_s) > 0
        assert run.beside_bytes > 0  # a process holds far more than twelve elements
