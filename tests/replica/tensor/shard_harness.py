"""Run a module sharded as the plan has it, in threads, and compare it with the module itself by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.replica.capture.capture import capture
from paceline.replica.module_utils import tensors_of
from paceline.replica.tensor import rules
from paceline.replica.tensor.graph_ops import operator_graph
from paceline.replica.tensor.placements import PARTIAL_GRAD, OnRank, Placement, Shard
from paceline.replica.tensor.rewrite import rewrite_for_shard
from paceline.replica.tensor.sharding_plan import NO_RULES, ShardingPlan, plan_sharding
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.shard_rules import ShardRules
from tests.replica.tensor.threads import together

assert rules, "they are registered"


class Weighed(TPCollectives):
    """Others, with the bytes that this one sends in rings."""

    def __init__(self, shards: TPCollectives) -> None:
        super().__init__(shards.rank, shards.count)
        self._shards, self.sent_bytes, self.calls = shards, 0.0, 0

    def _send(self, nbytes: int, rounds: int) -> None:
        self.sent_bytes += rounds * nbytes * (self.count - 1) / self.count
        self.calls += 1

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        self._send(tensor.nbytes, 2)
        return self._shards.all_reduce(tensor, what, largest=largest)

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        self._send(sum(torch.Size(shape).numel() for shape in shapes) * part.dtype.itemsize, 1)
        return self._shards.all_gather(part, shapes, what)

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        self._send(sum(part.nbytes for part in parts), 1)
        return self._shards.reduce_scatter(parts, what)

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        self._send(tensor.nbytes, 1)
        return self._shards.broadcast(tensor, owner, what)

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        self._send(tensor.nbytes, 1)
        return self._shards.reduce(tensor, owner, what)


@dataclass(frozen=True)
class Divided:
    """What came of it."""

    plan: ShardingPlan
    outputs: tuple[Tensor, ...]

    def strategy(self, operator: str) -> str:
        """The name of the way of the one operator that has this in its name."""
        (found,) = (step for step in self.plan.steps if operator in str(step.call.target))
        return found.strategy.name

    def redistributions(self, operator: str) -> list[tuple[type[Placement], type[Placement]]]:
        """(from, to) of what was converted for it, and has a gradient."""
        steps = [step for step in self.plan.steps if operator in str(step.call.target)]
        return [(type(a), type(b)) for step in steps for v, a, b in step.redistributions if v.differentiable]


def divided(
    module: nn.Module, inputs: Any, count: int, *, rtol: float = 1e-11, asked: ShardRules = NO_RULES
) -> Divided:
    """Divide it, run it and compare outputs, gradients, collectives and bytes with what they have to be.

    Args:
        module: in float64.
        inputs: of it.
        count: k.
        rtol: of outputs and gradients; as given, what float64 rounds off in sums of a few dozen terms in another order.
        asked: what the plan has to keep to.
    """
    captured = capture(module, inputs, operators=True)
    made = plan_sharding(operator_graph(captured, count, captured.flatten(inputs)), count, asked)
    outputs, gradients = _run(captured.module, captured.flatten(inputs))

    def work(shards: TPCollectives) -> tuple[list[Tensor], dict[str, Tensor], Weighed]:
        weighed = Weighed(shards)
        local = rewrite_for_shard(made, weighed).module
        _own(local)
        return *_run(local, captured.flatten(inputs)), weighed

    shards, _ = together(count, work)
    for of_shard, _, _ in shards:
        _close(of_shard, outputs, rtol)
    named = {name: made.parameters.get(name) for name in gradients}
    for name, layout in named.items():
        _close([_whole(layout, [given.get(name) for _, given, _ in shards])], [gradients[name]], rtol, name)
    assert any(isinstance(layout, Shard) for layout in named.values()), "something is divided"
    summed = sum(gradients[name].nbytes for name, layout in named.items() if layout == PARTIAL_GRAD)
    for _, _, weighed in shards:
        assert weighed.calls == made.cost.collectives
        sent = weighed.sent_bytes + 2 * (count - 1) / count * summed
        assert abs(sent - made.cost.sent_bytes) <= 1e-9 * sent, "the plan knows what is sent"
    return Divided(made, tuple(outputs))


def _run(module: nn.Module, leaves: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    outputs = list(module(*leaves))
    generator = torch.Generator().manual_seed(1)
    terms = [(torch.randn(t.shape, generator=generator, dtype=t.dtype) * t).sum() for t in outputs]
    parameters = {name: p for name, p in tensors_of(module).items() if isinstance(p, nn.Parameter) and p.requires_grad}
    found = torch.autograd.grad(sum(terms[1:], terms[0]), list(parameters.values()))
    return [t.detach() for t in outputs], dict(zip(parameters, found, strict=True))


def _own(module: nn.Module) -> None:
    """Threads share no tensor."""
    for each in module.modules():
        for name, held in list(each._parameters.items()):
            if held is not None:
                each._parameters[name] = nn.Parameter(held.detach().clone(), held.requires_grad)


def _whole(layout: Placement | None, parts: Sequence[Tensor | None]) -> Tensor:
    given = [part for part in parts if part is not None]
    if isinstance(layout, Shard):
        return layout.concat(given)
    if isinstance(layout, OnRank):
        assert len(given) == 1
        return given[0]
    return torch.stack(given).sum(0) if layout == PARTIAL_GRAD else given[0]


def _close(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float, what: str = "an output") -> None:
    for a, b in zip(found, expected, strict=True):
        assert 0 < b.abs().max() < torch.inf, f"{what} says nothing"
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 10, msg=lambda text: f"{what}: {text}")
