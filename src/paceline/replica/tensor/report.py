"""A sharding plan as rows and plain text: how each operator is sharded, what is sent, what stays whole and why.

A division as rows and as plain text: how each operator is cut, what is sent_bytes, and what stays whole.

::

    module  operator  cut              parameters  forward     backward    sends  whole because
            inputs    whole → shared                           all-reduce  512 B
    0       linear    column                  576
    2       linear    row                     520
    2       linear    partial → whole              all-reduce              512 B

A row without parameters that has an arrow is a conversion of what that operator made, for the next one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import fsum
from typing import Any

import torch

from paceline.core.formatting import amount
from paceline.replica.tensor import sharding_plan
from paceline.replica.tensor.base import GraphTensor, OpCall, rule_of
from paceline.replica.tensor.branches import BRANCH
from paceline.replica.tensor.op_times import op_work
from paceline.replica.tensor.placements import (
    PARTIAL_GRAD,
    REPLICATE,
    OnRank,
    Partial,
    Placement,
    Replicate,
    ReplicatePartialGrad,
    Shard,
)
from paceline.replica.tensor.plan_search import SearchStep
from paceline.replica.tensor.redistribute_cost import (
    RedistributionCost,
    cheapest_source,
    redistribution_cost,
    value_key,
)
from paceline.replica.tensor.sharding_plan import ShardingPlan
from paceline.shard_rules import WHOLE, ShardRules

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

_UNITS = {"column": "outputs", "row": "inputs", "filters": "filters", "channels": "channels", "groups": "groups"}

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def why_replicated(call: OpCall, asked: str | None) -> str:
    """Of an operator of which every shard does all.

    Args:
        call: the operator.
        asked: what the strategy's ``shard_rules`` say of its module.
    """
    if asked == WHOLE:
        return "shard_rules say so"
    if operator_name(call.target).removesuffix("_cell") in _RECURRENT:
        return "its hidden units would have to be gathered in every time step"
    if rule_of(call.target) is None:
        return f"no rule for {operator_name(call.target)}"
    few = _too_few(call)
    if few:
        return f"{few} can't be divided among {call.shards}"
    return "dividing it would cost more than it saves"


def operator_name(target: Any) -> str:
    """Its name, without its namespace and overload.

    >>> import torch
    >>> operator(torch.ops.aten.linear.default)
    'linear'
    """
    words = str(target).split(".")
    return words[1] if words[0] == "aten" and len(words) > 1 else str(target)


def _too_few(call: OpCall) -> str:
    """Of what there are fewer than shards; "": there are enough, or it is not by number."""
    if call.target is ATTENTION:
        heads = call.inputs[0].shape[-3] if call.inputs[0].dims > 3 else call.shards
        return _counted(heads, "heads") if heads < call.shards else ""
    if any(
        sharding_plan.shards_a_parameter(call, strategy)
        for strategy in sharding_plan.rule_strategies(call, call.shards)
    ):
        return ""
    named = [
        strategy.name
        for strategy in sharding_plan.rule_strategies(call, 1)
        if sharding_plan.shards_a_parameter(call, strategy)
    ]
    found = [(sharding_plan.largest_count(call, name, call.shards), name) for name in dict.fromkeys(named)]
    if not found:
        return ""
    most, name = max(found, key=lambda each: each[0])
    return _counted(most, _UNITS.get(name, "units"))


def _counted(count: int, units: str) -> str:
    return f"{count} {units if count > 1 else units.removesuffix('s')}"


_PLACEMENTS: Mapping[type, str] = {
    Replicate: "whole", ReplicatePartialGrad: "shared", Partial: "partial", Shard: "split", OnRank: "owned"
}  # fmt: skip

_GAP = "  "
_TITLES = ("module", "operator", "cut", "parameters", "forward", "backward", "sends", "whole because")
_RIGHT = ("parameters", "sends")


@dataclass(frozen=True)
class ShardingRow:
    """An operator, or the conversion of a tensor that it made."""

    module: str
    """Full name; empty: the model itself, or the loss."""
    operator: str
    cut: str
    """The way's name, or ``whole``; of a conversion: from which layout to which."""
    parameters: int = 0
    """Elements, counted where they are first used."""
    forward: str = ""
    """The collective, if there is one."""
    backward: str = ""
    collectives: int = 0
    sent_bytes: int = 0
    """By one shard for one batch, forward and backward."""
    why_whole: str = ""


@dataclass(frozen=True)
class ShardingReport:
    """How a model is divided."""

    shards: int
    rows: tuple[ShardingRow, ...]
    parameters: int
    """Elements of the model's."""
    divided_parameters: int
    """Of them, those that are on one shard alone."""
    divided_work: float
    """Share of the work that is in operators which are divided."""
    parameters_by_shard: tuple[int, ...]

    @property
    def collectives(self) -> int:
        """Of one step of one batch."""
        return sum(row.collectives for row in self.rows)

    @property
    def sent_bytes(self) -> int:
        """By one shard for one batch."""
        return sum(row.sent_bytes for row in self.rows)

    def __str__(self) -> str:
        """The rows as a table, and below it what they come to."""
        cells = [_cells(row) for row in self.rows]
        shown = [i for i in range(len(_TITLES)) if any(line[i] for line in cells)]
        titles = [_TITLES[i] for i in shown]
        lines = [titles, *([line[i] for i in shown] for line in cells)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        head = f"{self.shards} shards; bytes: what a shard sends for one batch, forward and backward"
        return "\n".join([head, "", *(_line(line, titles, widths) for line in lines), "", *self._totals()])

    def to_json(self) -> dict[str, Any]:
        """Rows and totals, in plain types."""
        totals = {name: getattr(self, name) for name in ("collectives", "sent_bytes")}
        return asdict(self) | totals

    def _totals(self) -> Iterator[str]:
        share = self.divided_parameters / self.parameters if self.parameters else 0.0
        yield f"divided: {_percent(share)} of {self.parameters:,} parameters, {_percent(self.divided_work)} of the work"
        many = f"{self.collectives} collective{'s' if self.collectives != 1 else ''}"
        yield f"a step: {many}, {amount(self.sent_bytes)} sent by each shard"
        yield f"parameters by shard: {', '.join(f'{count:,}' for count in self.parameters_by_shard)}"


def sharding_report(plan: ShardingPlan, rules: ShardRules, passes: int = 1) -> ShardingReport:
    """What a plan comes to.

    Args:
        plan: of the model with its loss, or of a part of it.
        rules: of the strategy, which it was made by.
        passes: how many there are in a batch, each of what was planned for: the micro-batches that a shard is given.
    """
    sizes = _sizes(plan)
    done = [(op_work(step.call), step.strategy.share < 1) for step in plan.steps]
    total = fsum(amount for amount, _ in done)
    return ShardingReport(
        plan.shards,
        tuple(_Rows(plan, rules, sizes).rows(passes)),
        sum(sizes.values()),
        sum(size for name, size in sizes.items() if isinstance(plan.parameters.get(name), (Shard, OnRank))),
        fsum(amount for amount, divided in done if divided) / total if total else 0.0,
        tuple(sum(_held(plan.parameters.get(n, REPLICATE), size, s) for n, size in sizes.items()) for s in _each(plan)),
    )


def _each(plan: ShardingPlan) -> range:
    return range(plan.shards)


def _sizes(plan: ShardingPlan) -> dict[str, int]:
    """Elements of each parameter of the model."""
    return {name: tensor.numel() for name, tensor in plan.graph.captured.module.named_parameters()}


def _held(layout: Placement, size: int, shard: int) -> int:
    """Elements of a parameter that a shard has."""
    if isinstance(layout, Shard):
        return size // layout.block_size * layout.sizes[shard]
    return 0 if isinstance(layout, OnRank) and layout.shard != shard else size


class _Rows:
    def __init__(self, plan: ShardingPlan, rules: ShardRules, sizes: Mapping[str, int]) -> None:
        self._plan, self._rules = plan, rules
        self._owners, self._calls = plan.graph.captured.owners, plan.graph.calls
        self._left = dict(sizes)

    def rows(self, passes: int) -> Iterator[ShardingRow]:
        for row in self._of_a_pass():
            yield replace(row, collectives=row.collectives * passes, sent_bytes=row.sent_bytes * passes)
        yield from self._summed()

    def _of_a_pass(self) -> Iterator[ShardingRow]:
        for step in self._plan.steps:
            yield from self._conversions(step.redistributions)
            named = step.strategy.name not in ("", BRANCH)
            if sharding_plan.operator_parameters(step.call) or named or step.call.target is ATTENTION:
                yield self._operator(step)
        yield from self._conversions(self._at_the_end())

    def _operator(self, step: SearchStep) -> ShardingRow:
        call, strategy = step.call, step.strategy
        module = sharding_plan.module_of(call, self._owners)
        cut = strategy.name or (
            "divided" if strategy.share < 1 or sharding_plan.shards_a_parameter(call, strategy) else "whole"
        )
        owner = next((layout for layout in strategy.outputs if isinstance(layout, OnRank)), None)
        return ShardingRow(
            module,
            operator_name(call.target),
            cut if owner is None else f"{cut} {owner}",
            sum(self._left.pop(str(value.parameter), 0) for value in call.inputs),
            f"{strategy.collectives} within" if strategy.collectives else "",
            collectives=strategy.collectives,
            sent_bytes=round(strategy.sent_bytes),
            why_whole=why_replicated(call, self._rules.of(module)) if cut == "whole" else "",
        )

    def _conversions(self, converted: Iterable[tuple[GraphTensor, Placement, Placement]]) -> Iterator[ShardingRow]:
        for value, before, after in converted:
            found = redistribution_cost(before, after, self._plan.shards, differentiable=value.differentiable)
            if found is not None and any(found.collectives):
                yield self._conversion(value, before, after, found)

    def _conversion(
        self, value: GraphTensor, before: Placement, after: Placement, found: RedistributionCost
    ) -> ShardingRow:
        node = value.node
        forward, backward = found.collectives
        return ShardingRow(
            self._owners.get(node.name, "") if node not in self._calls else self._module(value),
            operator_name(node.target) if node in self._calls else node.name,
            f"{_kind(before)} → {_kind(after)}",
            forward=forward_collective(before, after) if forward else "",
            backward=backward_collective(before, after) if backward else "",
            collectives=forward + backward,
            sent_bytes=round((found.forward + found.backward) * value.nbytes),
        )

    def _module(self, value: GraphTensor) -> str:
        return sharding_plan.module_of(self._calls[value.node], self._owners)

    def _at_the_end(self) -> Iterator[tuple[GraphTensor, Placement, Placement]]:
        """What has to be made whole because the model gives it."""
        there: dict[object, list[Placement]] = {}
        for step in self._plan.steps:
            for value, layout in zip(step.call.outputs, step.strategy.outputs, strict=True):
                there.setdefault(value_key(value), []).append(layout)
            for value, _, layout in step.redistributions:
                there.setdefault(value_key(value), []).append(layout)
        for value in self._plan.graph.outputs():
            known = there.get(value_key(value), [REPLICATE])
            if REPLICATE not in known:
                yield value, cheapest_source(value, frozenset(known), self._plan.shards), REPLICATE

    def _summed(self) -> Iterator[ShardingRow]:
        """Gradients of parameters that all shards have and each uses for its part of the work: summed at the end."""
        layouts = self._plan.parameters
        values = {
            str(value.parameter): value
            for call in self._calls.values()
            for value in sharding_plan.operator_parameters(call)
            if layouts.get(str(value.parameter)) == PARTIAL_GRAD
        }
        if values:
            nbytes = sum(value.nbytes for value in values.values())
            sent_bytes = round(2 * (self._plan.shards - 1) / self._plan.shards * nbytes)
            what = f"{len(values)} gradients"
            yield ShardingRow("", what, "partial → whole", backward="all-reduce", collectives=1, sent_bytes=sent_bytes)


def forward_collective(before: Placement, after: Placement) -> str:
    """The collective of a conversion that has one."""
    if isinstance(before, OnRank):
        return "broadcast"
    if isinstance(before, Partial):
        return "reduce-scatter" if isinstance(after, Shard) else "all-reduce"
    return "all-gather"


def backward_collective(before: Placement, after: Placement) -> str:
    """The gradient goes the other way: of what is shared there are terms of it."""
    if isinstance(before, OnRank):
        return "reduce"
    if after == PARTIAL_GRAD:
        return "reduce-scatter" if isinstance(before, Shard) else "all-reduce"
    return "all-gather"


def _kind(layout: Placement) -> str:
    return _PLACEMENTS[type(layout)]


def _cells(row: ShardingRow) -> tuple[str, ...]:
    return (
        row.module,
        row.operator,
        row.cut,
        f"{row.parameters:,}" if row.parameters else "",
        row.forward,
        row.backward,
        amount(row.sent_bytes) if row.sent_bytes else "",
        row.why_whole,
    )


def _line(cells: Sequence[str], titles: Sequence[str], widths: Sequence[int]) -> str:
    placed = (
        cell.rjust(width) if title in _RIGHT else cell.ljust(width)
        for cell, title, width in zip(cells, titles, widths, strict=True)
    )
    return _GAP.join(placed).rstrip()


def _percent(share: float) -> str:
    """Rounded down, so that 100 % is all of it.

    >>> _percent(1.0), _percent(0.9996), _percent(0.5)
    ('100 %', '99.9 %', '50 %')
    """
    return f"{int(share * 1000 + 1e-9) / 10:g} %"
