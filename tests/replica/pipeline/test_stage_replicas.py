"""Columns that take turns at the stages of a pipeline give together what one process gives."""

import functools
import math

import pytest
from torch import nn
from torch.optim import SGD

from tests.replica.pipeline.hand_cuts import Chain, Norms, Skips, Tied
from tests.replica.pipeline.pipeline_world import Alone, World, batches, program, same

MOMENTUM = functools.partial(SGD, lr=0.1, momentum=0.9)

STATISTICS = tuple(
    f"{layer}.{name}"
    for layer in ("l0.1", "l1.1", "l2.2")
    for name in ("running_mean", "running_var", "num_batches_tracked")
)


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b"])
@pytest.mark.parametrize("copies", [(2, 1), (1, 3), (3, 2), (1, 2, 1), (2, 1, 3)])
@pytest.mark.parametrize("kind", [Chain, Skips, Tied])
def test_five_steps_equal_one_process(
    kind: type[nn.Module], copies: tuple[int, ...], schedule: str, rendezvous: bool
) -> None:
    """Also where a batch is too small for some of them to have a micro-batch."""
    job, m = program(kind, MOMENTUM), 6
    world = World(job, kind, schedule, len(copies), m, copies=copies, rendezvous=rendezvous)
    alone = Alone(job, m)
    for batch in batches(kind, 12, 7, 2, 1, 6):
        measured = world.all(lambda member, batch=batch: member.step(batch))
        loss = alone.step(batch)
        same(world.gradients(), alone.values() | alone.gradients())
        same(world.values(), alone.values())
        assert [each.samples for each in measured] == [batch.samples] * sum(copies)
        known = [each.loss for each in measured if not math.isnan(each.loss)]
        assert known == pytest.approx([loss] * copies[-1])


def test_batches_of_one_delta() -> None:
    """The gradient of the mean over both, though the second is too small for all."""
    job = program(Tied, MOMENTUM)
    world, alone = World(job, Tied, "1f1b", 2, 4, {"micro_steps": 2}, copies=(3, 1)), Alone(job, 4)
    for first, second in (batches(Tied, 8, 2), batches(Tied, 1, 4)):
        measured = world.all(lambda member, two=(first, second): member.step(*two))
        assert measured[-1].loss == pytest.approx(alone.step(first, second))
        same(world.values(), alone.values())


@pytest.mark.parametrize("recompute", ["none", "boundaries", "all"])
@pytest.mark.parametrize("copies", [(3, 1), (1, 2), (2, 2)])
def test_running_statistics_are_those_of_the_whole_mini_batch(copies: tuple[int, ...], recompute: str) -> None:
    """As stages of one column have them, to the rounding; also of who had no micro-batch."""
    options = {"batchnorm": "mini-batch", "recompute": recompute}
    job = program(Norms, MOMENTUM)
    plain, turns = (
        World(job, Norms, "1f1b", 2, 4, options, buffers=STATISTICS, copies=each) for each in ((1, 1), copies)
    )
    before = plain.values()
    for batch in batches(Norms, 8, 16, 13):
        for world in (plain, turns):
            world.all(lambda member, batch=batch: member.step(batch))
        same(turns.values(), plain.values())
    assert {name for name in before if name in STATISTICS} == set(STATISTICS)
    assert not any(before[name].equal(plain.values()[name]) for name in STATISTICS)


def test_statistics_of_a_batch_too_small_for_all() -> None:
    """Two micro-batches for three: the third has the same statistics without having seen anything."""
    options = {"batchnorm": "mini-batch"}
    job = program(Norms, MOMENTUM)
    plain, turns = (
        World(job, Norms, "gpipe", 2, 2, options, buffers=STATISTICS, copies=each) for each in ((1, 1), (3, 1))
    )
    for batch in batches(Norms, 6, 8):
        for world in (plain, turns):
            world.all(lambda member, batch=batch: member.step(batch))
        same(turns.values(), plain.values())
