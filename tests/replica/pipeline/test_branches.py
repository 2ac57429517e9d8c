"""Branches on workers of their own: who needs whom, that nobody waits for a neighbour, and what comes out."""

import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from paceline import InputError, Program, Strategy
from paceline.replica.base import Batch
from paceline.replica.capture.capture import capture
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.cut_groups import Units, group
from paceline.replica.pipeline.partition import named_boundaries
from paceline.replica.pipeline.prepare import capture_units, cut_as_named, part_dependencies
from tests.replica.pipeline.cut_models import CUTS, NEEDS, Branches
from tests.replica.pipeline.hand_cuts import own
from tests.replica.pipeline.pipeline_world import Alone, World, same
from tests.replica.pipeline.thread_p2p import BOUND_S


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Branches().double().train()


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(torch.randn(10, 1, 6, 6, dtype=torch.float64, generator=generator), torch.arange(10) % 5, 10)


def program() -> Program:
    data = (batch().input, batch().target)
    return Program(model, nn.functional.cross_entropy, functools.partial(SGD, lr=0.1, momentum=0.9), train=data)


@functools.cache
def units() -> Units:
    return group(capture(model(), batch().input[:2]))


def world(schedule: str, micro_batches: int) -> World:
    made = units()
    parts = cut(made, named_boundaries(CUTS, 7, made.modules(), made.nodes()))
    return World(program(), nn.Module, schedule, 7, micro_batches, cutter=own(parts))


def test_who_needs_whom_is_read_off_the_cut() -> None:
    made, strategy = model(), Strategy(stages=7, cuts=CUTS)
    found = cut_as_named(program(), strategy, made, batch())
    assert str(part_dependencies(program(), found, made, batch())) == NEEDS


def test_no_gradient_comes_back_to_a_trunk_that_is_frozen() -> None:
    made = model()
    for parameter in (*made.trunk.parameters(), *made.b1.parameters()):  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    found = cut_as_named(program(), Strategy(stages=7, cuts=CUTS), made, batch())
    assert str(part_dependencies(program(), found, made, batch())) == NEEDS.replace("0-", "0>")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_five_steps_equal_one_process(schedule: str) -> None:
    job, alone = world(schedule, 7), Alone(program(), 7)
    for _ in range(5):
        job.all(lambda member: member.step(batch()))
        alone.step(batch())
    same(job.values(), alone.values())


class Gates:
    """Let an action begin only when others have been; who waits for ever, fails."""

    def __init__(self, job: World) -> None:
        self._opened: dict[tuple[int, str], threading.Event] = defaultdict(threading.Event)
        self.waited: list[tuple[int, str]] = []
        for member in job.members:
            for number, stage in member.replica._runtime.stages.items():
                for kind in ("forward", "backward"):
                    setattr(stage, kind, self._opening((number, kind), getattr(stage, kind)))
        self.before: dict[tuple[int, str], list[tuple[int, str]]] = {}

    def _opening(self, what: tuple[int, str], do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **options: Any) -> Any:
            for other in self.before.get(what, ()):
                assert self._opened[other].wait(BOUND_S / 4), f"{what} waited for {other}"
                self.waited.append(other)
            found = do(*args, **options)
            self._opened[what].set()
            return found

        return done


def test_branches_wait_for_nothing_of_each_other() -> None:
    """The second branch goes forward only when the third and the fourth have, and these backward only when the second
    has: in a chain each would wait for the other."""
    job, alone = world("1f1b", 4), Alone(program(), 4)
    gates = Gates(job)
    gates.before = {
        (1, "forward"): [(4, "forward"), (5, "forward")],
        (5, "backward"): [(1, "backward")],
        (4, "backward"): [(1, "backward")],
    }
    job.all(lambda member: member.step(batch()))
    alone.step(batch())
    same(job.values(), alone.values())
    assert len(gates.waited) == 4 * 4


def test_a_cut_within_a_child_of_a_sequential_looks_into_it() -> None:
    """Otherwise its children are called as they are, whatever they do."""

    def plain() -> nn.Module:
        return nn.Sequential(nn.Identity(), Branches()).double()

    strategies = Strategy(stages=2, cuts=("1.b2",)), Strategy(stages=2, cuts=("1",))
    inside, between = (capture_units(strategy, plain(), batch().input).modules() for strategy in strategies)
    assert {"1.b1", "1.b2.0", "1.head"} <= inside.keys()
    assert between.keys() == {"0", "1"}
    with pytest.raises(InputError, match=r"unknown module or node in cuts '1\.b9'"):
        cut_as_named(program(), Strategy(stages=2, cuts="1.b9"), plain(), batch())
