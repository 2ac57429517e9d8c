"""A shard's step as a graph does what the shard does, bit for bit, and all shards have graphs, or none."""

import contextlib
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.program import leaves
from paceline.replica.module_utils import tensors_of
from paceline.replica.step_graph import form_of
from paceline.replica.tensor import short_steps
from paceline.replica.tensor.rewrite import rewrite_for_shard
from paceline.replica.tensor.short_steps import ShortSteps
from paceline.replica.tensor.tp_group import TPCollectives
from tests.replica.tensor.cases import own, planned
from tests.replica.tensor.shard_harness import Weighed
from tests.replica.tensor.test_models import LARGE, SMALL, made
from tests.replica.tensor.threads import together


class Ticks(threading.local):
    """A clock for each thread, which goes on by a millisecond each time it is looked at, as a step does twice."""

    now = 0

    def monotonic_ns(self) -> int:
        """Return nanoseconds."""
        self.now += 10**6
        return self.now


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are short enough, and were made for long enough."""
    monkeypatch.setattr(short_steps, "time", Ticks())
    monkeypatch.setattr(short_steps, "WARM_S", 0.0)
    monkeypatch.setattr(short_steps, "SHORT_STEP_S", float("inf"))


class Squares(nn.Module):
    """The mean square of all that a model returns, as a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        found = [leaf for leaf in leaves(self.model(*inputs, **named)) if leaf.is_floating_point()]
        return sum((leaf.square().mean() for leaf in found[1:]), found[0].square().mean())


class Shard:
    """One shard of a model, by hand."""

    def __init__(self, plan: Any, shards: TPCollectives, inputs: Any) -> None:
        self.group = Weighed(shards)
        self.module = own(rewrite_for_shard(plan, self.group)).module.train()
        self.leaves = plan.graph.captured.flatten(inputs)
        self.short = ShortSteps(self.module, self.group, contextlib.nullcontext, contextlib.nullcontext)

    def step(self, weight: float = 1.0) -> tuple[bool, list[Tensor]]:
        """Whether it was made by a graph; loss, gradients and buffers."""
        plain = False

        def as_it_is() -> tuple[Tensor, int]:
            nonlocal plain
            plain = True
            loss = self.module(*self.leaves)[0]
            turned = time.monotonic_ns()
            (loss * weight).backward()
            return loss.detach(), turned

        for parameter in self.module.parameters():
            parameter.grad = None
        began = time.monotonic_ns()
        loss, turned = self.short.differentiate(self.leaves, weight, as_it_is)
        assert began < turned <= time.monotonic_ns()
        found = [loss, *(p.grad for p in tensors_of(self.module).values() if p.grad is not None)]
        return not plain, [each.clone() for each in (*found, *self.module.buffers())]


@pytest.mark.parametrize(
    ("name", "k"), [*((name, k) for name in SMALL for k in (2, 3)), *((name, 2) for name in LARGE)]
)
def test_graphs_have_the_same_bits(name: str, k: int) -> None:
    model, job = made(name)
    loss = Squares(model)
    plan, inputs = planned(loss, job.inputs, k), job.inputs

    def work(shards: TPCollectives) -> list[tuple[bool, bool]]:
        graphed, plain = Shard(plan, shards, inputs), Shard(plan, shards, inputs)
        found = []
        for weight in (1.0, 1.0, 1.0, 7.0):
            by_graph, mine = graphed.step(weight)
            plain.short.steps[form_of(plain.leaves)] = None  # it has none
            _, its = plain.step(weight)
            same = len(mine) == len(its) and all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
            found.append((by_graph, same))
        return found

    for found in together(k, work)[0]:
        assert [by_graph for by_graph, _ in found] == [False, False, True, True]
        assert all(same for _, same in found)


def perceptron() -> nn.Module:
    """Divided by columns and then rows, so that shards add up once in each direction."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).double()


INPUTS = (torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(6, 8),)


def by_hand(work: Any) -> list[Any]:
    plan = planned(Squares(perceptron()), INPUTS, 2)
    return together(2, lambda shards: work(Shard(plan, shards, INPUTS)))[0]


def test_one_shard_without_a_graph_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = ShortSteps._traced

    def fails_on_one(self: ShortSteps, given: Any) -> Any:
        if self._shards.rank == 1:
            raise NotImplementedError
        return traced(self, given)

    monkeypatch.setattr(ShortSteps, "_traced", fails_on_one)

    def work(shard: Shard) -> tuple[list[bool], list[Any]]:
        return [shard.step()[0] for _ in range(5)], list(shard.short.steps.values())

    assert by_hand(work) == [([False] * 5, [None])] * 2


def test_a_graph_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ShortSteps._run

    def differs_on_one(self: ShortSteps, *given: Any) -> Any:
        loss, *gradients = run(self, *given)
        return loss, *(gradient + (self._shards.rank == 0) for gradient in gradients)

    monkeypatch.setattr(ShortSteps, "_run", differs_on_one)

    def work(shard: Shard) -> list[bool]:
        return [shard.step()[0] for _ in range(4)]

    assert by_hand(work) == [[False] * 4] * 2


def test_long_steps_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_steps, "SHORT_STEP_S", 1e-4)

    def work(shard: Shard) -> list[bool]:
        return [shard.step()[0] for _ in range(4)]

    assert by_hand(work) == [[False] * 4] * 2


def test_a_short_run_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_steps, "WARM_S", 5.5e-3)

    def work(shard: Shard) -> list[bool]:
        return [shard.step()[0] for _ in range(10)]

    # A step takes a millisecond: 8 of them are the first power of two that is long enough.
    assert by_hand(work) == [[False] * 8 + [True] * 2] * 2


class Lost(Exception):  # noqa: N818 (of this test)
    """Another shard was lost."""


def test_what_a_collective_raises_is_raised() -> None:
    def work(shard: Shard) -> tuple[bool, str]:
        for _ in range(2):
            shard.step()
        by_graph, _ = shard.step()

        def lost(*_: Any, **__: Any) -> Tensor:
            raise Lost("of this")

        shard.group.all_reduce = lost  # type: ignore[method-assign]
        with pytest.raises(Lost, match="of this"):
            shard.step()
        return by_graph, "raised"

    assert by_hand(work) == [(True, "raised")] * 2


def test_a_step_takes_as_many_collectives() -> None:
    def work(shard: Shard) -> tuple[int, int]:
        counts = list(_counts(shard))
        return counts[1], counts[-1]

    (plain, graphed), other = by_hand(work)
    assert plain == graphed > 0
    assert other == (plain, graphed)


def _counts(shard: Shard) -> Iterator[int]:
    for _ in range(5):
        before = shard.group.calls
        shard.step()
        yield shard.group.calls - before


def test_the_module_is_left_as_it_is() -> None:
    def work(shard: Shard) -> bool:
        before = deepcopy(shard.module.state_dict())
        for _ in range(3):
            shard.step()
        groups = [part.shards for part in shard.module.modules() if hasattr(part, "shards")]
        now = shard.module.state_dict()
        return all(group is shard.group for group in groups) and all(torch.equal(now[n], before[n]) for n in before)

    assert all(by_hand(work))
