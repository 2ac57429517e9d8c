"""Compare a model on one process with the shards that a plan makes of it: outputs, gradients and buffers by name.

A :class:`Case` is one operator with tensors before it whose layout can be forced, so that each way of its rule is tried
in each layout, not only what the plan likes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.program import Tree, call, leaves
from paceline.replica.capture.capture import capture
from paceline.replica.tensor import rules
from paceline.replica.tensor.base import (
    GraphTensor,
    OpCall,
    OpRule,
    OpStrategy,
    replicated_strategies,
    rule_of,
    sharded_strategies,
)
from paceline.replica.tensor.graph_ops import OperatorGraph, operator_graph
from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, REPLICATE, OnRank, Placement, Shard, even_sizes
from paceline.replica.tensor.plan_search import SearchStep
from paceline.replica.tensor.redistribute import Placements, PlanCost, ValueKey, input_cost
from paceline.replica.tensor.rewrite import ShardGraph, rewrite_for_shard
from paceline.replica.tensor.sharding_plan import ShardingPlan, parameter_placements, plan_sharding
from paceline.replica.tensor.tp_group import TPCollectives
from tests.replica.tensor.threads import together

__all__ = ["rules"]

ATOL = 1e-10
"""Float64: sums of at most some hundred terms near 1 in another order; a wrong cut differs by about 1."""


class Made(NamedTuple):
    """By one process, or by one shard."""

    outputs: list[Tensor]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def looked_at(model: nn.Module, inputs: Tree, k: int) -> OperatorGraph:
    """The operators of a model."""
    return operator_graph(capture(model, inputs, operators=True), k)


def eager(model: nn.Module, inputs: Tree) -> Made:
    """What the model itself does; it stays as it is."""
    return _run(deepcopy(model), lambda own: leaves(call(own, inputs)))


def sharded(made: ShardingPlan, inputs: Tree) -> tuple[list[Made], Counter[str]]:
    """What each shard does, each with tensors of its own, and the collectives."""
    captured = made.graph.captured

    def work(shards: TPCollectives) -> Made:
        shard = own(rewrite_for_shard(made, shards))
        return _run(shard.module, lambda module: leaves(captured.rebuild(module(*captured.flatten(inputs)))))

    return together(made.shards, work)


def own(shard: ShardGraph) -> ShardGraph:
    """With copies of its tensors, which threads would otherwise have in common."""
    for module in shard.module.modules():
        for name, parameter in list(module._parameters.items()):
            assert parameter is not None, name
            module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            assert buffer is not None, name
            module._buffers[name] = buffer.detach().clone()
    return shard


def _run(module: nn.Module, forward: Callable[[nn.Module], list[Tensor]]) -> Made:
    outputs = forward(module)
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in differentiable]
        torch.autograd.backward(differentiable, seeds)
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return Made([output.detach() for output in outputs], gradients, dict(module.named_buffers()))


def same(made: ShardingPlan, model: nn.Module, inputs: Tree, what: str = "") -> Counter[str]:
    """Assert that the shards of a plan are the model; returns the collectives that it took, forward and backward."""
    return assert_same(made, eager(model, inputs), inputs, what)


def assert_same(made: ShardingPlan, expected: Made, inputs: Tree, what: str) -> Counter[str]:
    """As :func:`same`, of a model that has run."""
    shards, calls = sharded(made, inputs)
    for shard in shards:
        assert len(shard.outputs) == len(expected.outputs), what
        for index, (output, right) in enumerate(zip(shard.outputs, expected.outputs, strict=True)):
            _close(output, right, f"{what}: output {index}")
    names = made.parameters.keys()
    for name, gradient in expected.gradients.items():
        if name in names:
            parts = [shard.gradients.get(name) for shard in shards]
            found = put_together(parts, made.parameters[name], gradient)
            _close(found, gradient if gradient is not None else None, f"{what}: gradient of {name}")
    for name, buffer in expected.buffers.items():
        if name in names:
            held = [shard.buffers.get(name) for shard in shards]
            _close(put_together(held, made.parameters[name], buffer, terms=False), buffer, f"{what}: buffer {name}")
    return calls


def put_together(
    parts: Sequence[Tensor | None], layout: Placement, like: Tensor | None, *, terms: bool = True
) -> Tensor | None:
    """The whole tensor; no part of a gradient is as good as zeros."""
    if like is None or all(part is None for part in parts):
        return None
    if isinstance(layout, OnRank):
        return parts[layout.shard]
    if isinstance(layout, Shard):
        shapes = [layout.local_shape(like.shape, shard) for shard in range(len(parts))]
        filled = [like.new_zeros(s) if p is None else p for p, s in zip(parts, shapes, strict=True)]
        return layout.concat(filled)
    if layout == PARTIAL_GRAD and terms:
        return sum((part for part in parts if part is not None), torch.zeros_like(like))
    for part in parts[1:]:
        _close(part, parts[0], "all shards have the same")
    return parts[0]


def _close(found: Tensor | None, right: Tensor | None, what: str) -> None:
    if found is None or right is None:
        nothing = all(each is None or not each.any() for each in (found, right))
        assert nothing, f"{what}: {found} for {right}"
        return
    assert found.dtype == right.dtype, what
    torch.testing.assert_close(found, right, rtol=ATOL, atol=ATOL, equal_nan=True, msg=lambda why: f"{what}: {why}")


def holds_its_part(made: ShardingPlan, model: nn.Module) -> None:
    """Assert that each shard has of each tensor as many elements as its layout says, and no tensor of others."""
    whole = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))

    def held(shards: TPCollectives) -> dict[str, torch.Size]:
        module = rewrite_for_shard(made, shards).module
        return {n: t.shape for n, t in (*module.named_parameters(), *module.named_buffers())}

    shapes, _ = together(made.shards, held)
    for name, layout in made.parameters.items():
        if name not in whole:  # a number that the graph holds
            continue
        for shard, has in enumerate(shapes):
            if isinstance(layout, Shard):
                assert has[name] == layout.local_shape(whole[name].shape, shard), (name, shard)
            elif isinstance(layout, OnRank) and layout.shard != shard:
                assert name not in has, (name, shard)
            else:
                assert has[name] == whole[name].shape, (name, shard)


def split_share(made: ShardingPlan, model: nn.Module) -> float:
    """Of the elements of all parameters, how many are divided among the shards."""
    parameters = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    divided = [n for n, layout in made.parameters.items() if isinstance(layout, (Shard, OnRank)) and n in parameters]
    return sum(parameters[name].numel() for name in divided) / total


def planned(model: nn.Module, inputs: Tree, k: int) -> ShardingPlan:
    """The plan of a model."""
    return plan_sharding(looked_at(model, inputs, k), k)


@dataclass(frozen=True)
class Case:
    """One operator of a rule, on tensors that are computed from inputs and on parameters.

    Args:
        name: of the test.
        rule: that it is to be tried of.
        function: (*tensors, *parameters) -> what the operator gives.
        tensors: shapes of what is computed; the first dim is the samples. A tensor itself is given as it is.
        parameters: shapes.
        buffers: of the module, by name: given to ``function`` after the parameters.
        names: those of strategies that have to be there.
        whole: whether the rule has to say that it can't be divided.
    """

    name: str
    rule: OpRule
    function: Callable[..., Any]
    tensors: Sequence[tuple[int, ...] | Tensor]
    parameters: Sequence[tuple[int, ...]] = ()
    buffers: Sequence[Tensor] = ()
    names: tuple[str, ...] = ()
    whole: bool = False

    def __str__(self) -> str:
        return self.name


class _Module(nn.Module):
    """Each tensor times a parameter, whose gradient says what the gradient of the tensor is; then the operator."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        shapes = [None if isinstance(each, Tensor) else each[1:] for each in case.tensors]
        self._function = case.function
        self._scaled = [shape is not None for shape in shapes]
        self.scales = nn.ParameterList(_random(s, generator) for s in shapes if s is not None)
        self.weights = nn.ParameterList(_random(shape, generator) for shape in case.parameters)
        for index, buffer in enumerate(case.buffers):
            self.register_buffer(f"buffer{index}", buffer.clone())
        self._buffer_count = len(case.buffers)

    def forward(self, *tensors: Tensor) -> Any:
        scales = iter(self.scales)
        made = [t * next(scales) if scaled else t for t, scaled in zip(tensors, self._scaled, strict=True)]
        buffers = [getattr(self, f"buffer{index}") for index in range(self._buffer_count)]
        return self._function(*made, *self.weights, *buffers)


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def built(case: Case) -> tuple[nn.Module, Tree]:
    """Its module and input."""
    generator = torch.Generator().manual_seed(3)
    inputs = tuple(t if isinstance(t, Tensor) else _random(t, generator) for t in case.tensors)
    return _Module(case), inputs


SHARDS = ((3,), (2, 4))
"""Numbers of shards by which tests try every way: `make test` tries the first ones."""


def every_way(case: Case, shards: Sequence[int] = (2, 3, 4)) -> None:
    """Assert that each way of the case's rule is the operator itself, from each layout, for each k."""
    module, inputs = built(case)
    captured, expected = capture(module, inputs, operators=True), eager(module, inputs)
    for k in shards:
        found = operator_graph(captured, k)
        calls = [each for each in found.calls.values() if rule_of(each.target) is case.rule]
        assert calls, f"{[str(each.target) for each in found.calls.values()]}: none is of {case.name}"
        asked = calls[-1]
        strategies = [strategy for strategy in possible(asked) if _can_be_had(asked, strategy)]
        names = {strategy.name for strategy in strategies}
        assert names >= set(case.names), f"k = {k}: {case.names} of {names}"
        assert any(map(_divides, strategies)) is not case.whole, f"k = {k}: {strategies}"
        for strategy in strategies:
            assert_same(forced(found, k, {asked.node: strategy}), expected, inputs, f"k = {k}, {_told(strategy)}")


def possible(asked: OpCall) -> list[OpStrategy]:
    """All ways of an operator, whatever its tensors can be had as."""
    offers = [frozenset(layouts(value, asked)) for value in asked.inputs]
    return list(dict.fromkeys((*replicated_strategies(asked), *sharded_strategies(asked, offers))))


def layouts(value: GraphTensor, asked: OpCall) -> Iterator[Placement]:
    """Those that a tensor can have: uneven parts, the larger ones first or last, by units, and in two blocks."""
    k = asked.shards
    yield from (REPLICATE, PARTIAL_GRAD)
    if value.dtype.is_floating_point:
        yield PARTIAL
    for dim in range(value.dims):
        length = value.shape[dim]
        yield from asked.shardings(length, dim - value.dims)
        if length >= k:
            yield Shard(dim - value.dims, even_sizes(length, k))
            yield Shard(dim - value.dims, even_sizes(length, k)[::-1])
        if length % 2 == 0 and length // 2 >= k:
            yield Shard(dim - value.dims, even_sizes(length // 2, k), blocks=2)


def _can_be_had(asked: OpCall, strategy: OpStrategy) -> bool:
    """A parameter is never a term of a sum."""
    return all(
        v.parameter is None or layout != PARTIAL for v, layout in zip(asked.inputs, strategy.inputs, strict=True)
    )


def _divides(strategy: OpStrategy) -> bool:
    return any(isinstance(layout, Shard) or layout == PARTIAL for layout in strategy.inputs)


def _told(strategy: OpStrategy) -> str:
    before, after = (", ".join(map(str, layouts)) for layouts in (strategy.inputs, strategy.outputs))
    return f"{strategy.name or 'unnamed'}: {before} -> {after}"


def forced(found: OperatorGraph, k: int, strategies: Mapping[Node, OpStrategy]) -> ShardingPlan:
    """The plan by which some operators are divided in these ways, and all others are not."""
    there: dict[ValueKey, Placements] = {}
    steps: list[SearchStep] = []
    for each in found.calls.values():
        strategy = strategies.get(each.node) or _as_it_is(each, there)
        had = input_cost(each, strategy, there)
        assert had is not None, f"{each.node}: {_told(strategy)}"
        _, converted, versions = had
        there.update(versions)
        there.update({v.key: frozenset((layout,)) for v, layout in zip(each.outputs, strategy.outputs, strict=True)})
        steps.append(SearchStep(each, strategy, converted))
    return ShardingPlan(found, k, tuple(steps), parameter_placements(steps), PlanCost())


def _as_it_is(each: OpCall, there: Mapping[ValueKey, Placements]) -> OpStrategy:
    """Whole; but an element of a tuple as it was made."""
    if each.target is getitem and len(each.inputs) == 1:
        (layout,) = there[each.inputs[0].key]
        return next(strategy for strategy in possible(each) if strategy.inputs == (layout,))
    return next(iter(replicated_strategies(each)))
