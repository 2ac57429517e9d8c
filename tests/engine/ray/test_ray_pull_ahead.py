"""Replicas on Ray that pull ahead: what they compute, and that each batch is used once whoever dies."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from paceline import Run, train
from paceline.engine.server.messages import Member
from tests import oracle
from tests.engine import programs
from tests.engine.local import moments, test_on_death
from tests.engine.ray.several_moments import Dying
from tests.engine.served_cases import AHEAD, ROUNDING

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

STEPS = 9
AHEAD_OF = "aggregation=asynchronous pull_ahead=true"
PROGRAM = programs.program(optimizer=functools.partial(SGD, lr=0.1, momentum=0.9), clip_norm=0.5)


@pytest.mark.parametrize("form", ["servers=1", "servers=3", "standby=1 servers=1", *AHEAD[2]])
def test_each_delta_is_of_the_a_before(on_ray: OnRay, form: str) -> None:
    run = on_ray(PROGRAM, f"replicas=1 {AHEAD_OF} {form}", steps=STEPS)
    oracle.assert_same(run.model, oracle.one_exchange_behind(PROGRAM, STEPS), ROUNDING)
    assert run.summary["staleness"] == {"0": 1, "1": STEPS - 1}


def test_in_virtual_time_as_well(on_ray: OnRay) -> None:
    """Running buffers, random numbers and micro-steps included; of virtual time the first Δ of each update's A."""
    program = programs.program(model=programs.batchnorm, train=programs.data(samples=48))
    strategy = f"replicas=1 accumulate=2 {AHEAD_OF}"
    run = on_ray(program, strategy, steps=STEPS)
    virtual = train(program, strategy, engine="virtual", steps=STEPS, progress=False)
    oracle.assert_same(run.model, virtual.state, ROUNDING)


def test_what_is_pushed_is_compressed(on_ray: OnRay) -> None:
    run = on_ray(PROGRAM, f"replicas=2 compression=top-k:ratio=0.5 servers=2 {AHEAD_OF}", steps=STEPS)
    assert run.summary["applied"] == 2 * STEPS


def test_those_that_are_cancelled_begin_with_the_newest_a(on_ray: OnRay) -> None:
    policy = "aggregation=buffered:k=1,cancel=true pull_ahead=true"
    run = on_ray(PROGRAM, f"replicas=3 {policy}", steps=STEPS)
    assert run.summary["gradients"] + run.summary["cancelled"] == 3 * STEPS
    assert run.summary["applied"] + run.summary["discarded"] == run.summary["gradients"]


@pytest.mark.parametrize("on_death", ["replace", "continue"])
@pytest.mark.parametrize("more", ["", "servers=2"])
def test_each_sample_is_applied_once_an_epoch_whoever_dies(
    on_ray: OnRay, tmp_path: Path, on_death: str, more: str
) -> None:
    """Where others do what a dead one had begun, they had begun something else, which is in vain."""
    program, policy = moments.counting_any_batch(), "stale-synchronous:bound=0,combine=sum"  # nobody gets ahead
    loop = functools.partial(test_on_death.dying, folder=tmp_path, at={(1, 3): "a"})
    run = on_ray(
        program, f"replicas=3 aggregation={policy} pull_ahead=true {more}", epochs=3, on_death=on_death, loop=loop
    )
    assert [exit_.replica for exit_ in run.left] == [1]
    assert torch.equal(run.state["weight"], torch.full((moments.SAMPLES,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("member", "moment"),
    [(Member(0), "decides"), (Member(1), "is sent a slice"), (Member(0), "standby has it")],
    ids=lambda value: str(getattr(value, "label", value)),
)
def test_a_server_dies_while_the_next_delta_is_computed(
    on_ray: OnRay, tmp_path: Path, member: Member, moment: str
) -> None:
    model = Dying(programs.mlp, member, moment, 4, tmp_path / "died")
    program = programs.program(model=model, optimizer=functools.partial(SGD, lr=0.1, momentum=0.9), clip_norm=0.5)
    run = on_ray(program, f"replicas=1 servers=2 standby=1 {AHEAD_OF}", steps=STEPS)
    assert (tmp_path / "died").exists()
    oracle.assert_same(run.model, oracle.one_exchange_behind(PROGRAM, STEPS), ROUNDING)
    assert run.summary["staleness"] == {"0": 1, "1": STEPS - 1}
