"""Report of a sharding plan as rows and plain text: how each operator is sharded, what is sent, what stays whole.

::

    module  operator  cut              parameters  forward     backward    sends  whole because
            inputs    whole → shared                           all-reduce  512 B
    0       linear    column                  576
    2       linear    row                     520
    2       linear    partial → whole              all-reduce              512 B

A row without parameters that has an arrow is the redistribution of what that operator made, for the next one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import fsum
from typing import Any

import torch

from paceline.core.formatting import amount
from paceline.replica.tensor.base import OpCall, rule_of
from paceline.replica.tensor.branch_on_rank import BRANCH
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
from paceline.replica.tensor.redistribute_cost import Redistribution, cheapest_source, redistribution_cost
from paceline.replica.tensor.sharding_plan import (
    ShardingPlan,
    largest_count,
    module_of,
    operator_parameters,
    rule_strategies,
    shards_a_parameter,
)
from paceline.shard_rules import WHOLE, ShardRules

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

_UNITS = {"column": "outputs", "row": "inputs", "filters": "filters", "channels": "channels", "groups": "groups"}

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

_PLACEMENTS: Mapping[type, str] = {
    Replicate: "whole", ReplicatePartialGrad: "shared", Partial: "partial", Shard: "split", OnRank: "owned"
}  # fmt: skip
"""Placement -> its name in tables."""

_GAP = "  "
_TITLES = ("module", "operator", "cut", "parameters", "forward", "backward", "sends", "whole because")
_RIGHT = ("parameters", "sends")


@dataclass(frozen=True)
class ShardingRow:
    """An operator, or the redistribution of a tensor that it made."""

    module: str
    """Full name; empty: the model itself, or the loss."""
    operator: str
    cut: str
    """Name of the strategy, or ``whole``; of a redistribution: from which placement to which."""
    parameters: int = 0
    """Elements, counted where they are first used."""
    forward: str = ""
    """The collective, if there is one."""
    backward: str = ""
    collectives: int = 0
    sent_bytes: int = 0
    """Bytes sent by one shard for one batch, forward and backward."""
    why_whole: str = ""


@dataclass(frozen=True)
class ShardingReport:
    """The sharding of a model, row by row and in total."""

    shards: int
    rows: tuple[ShardingRow, ...]
    parameters: int
    """Elements of the model's parameters."""
    divided_parameters: int
    """Elements of those parameters that are on one shard alone."""
    divided_work: float
    """Share of the work that is in sharded operators."""
    parameters_by_shard: tuple[int, ...]

    @property
    def collectives(self) -> int:
        """Collectives of one step of one batch."""
        return sum(row.collectives for row in self.rows)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by one shard for one batch."""
        return sum(row.sent_bytes for row in self.rows)

    def __str__(self) -> str:
        """Format the rows as a table with totals below; columns without an entry are left out."""
        cells = [
            (
                row.module,
                row.operator,
                row.cut,
                f"{row.parameters:,}" if row.parameters else "",
                row.forward,
                row.backward,
                amount(row.sent_bytes) if row.sent_bytes else "",
                row.why_whole,
            )
            for row in self.rows
        ]
        lines = [f"{self.shards} shards; bytes: what a shard sends for one batch, forward and backward", ""]
        shown = [i for i in range(len(_TITLES)) if any(row[i] for row in cells)]
        widths = {i: max(len(row[i]) for row in (_TITLES, *cells)) for i in shown}
        for row in (_TITLES, *cells):
            padded = (row[i].rjust(widths[i]) if _TITLES[i] in _RIGHT else row[i].ljust(widths[i]) for i in shown)
            lines.append(_GAP.join(padded).rstrip())
        share = self.divided_parameters / self.parameters if self.parameters else 0.0
        collectives = f"{self.collectives} collective{'s' if self.collectives != 1 else ''}"
        lines += [
            "",
            f"divided: {_percent(share)} of {self.parameters:,} parameters, {_percent(self.divided_work)} of the work",
            f"a step: {collectives}, {amount(self.sent_bytes)} sent by each shard",
            f"parameters by shard: {', '.join(f'{count:,}' for count in self.parameters_by_shard)}",
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return rows and totals in plain types."""
        return asdict(self) | {"collectives": self.collectives, "sent_bytes": self.sent_bytes}


def _percent(share: float) -> str:
    """Format a share, rounded down, so that 100 % is all of it.

    >>> _percent(1.0), _percent(0.9996), _percent(0.5)
    ('100 %', '99.9 %', '50 %')
    """
    return f"{int(share * 1000 + 1e-9) / 10:g} %"


def sharding_report(plan: ShardingPlan, rules: ShardRules, passes: int = 1) -> ShardingReport:
    """Report a plan.

    Args:
        plan: plan of the model with its loss, or of a part of it.
        rules: rules of the strategy, by which it was made.
        passes: passes of one batch, each of what was planned for: the micro-batches that a shard computes.
    """
    sizes = {name: tensor.numel() for name, tensor in plan.graph.captured.module.named_parameters()}
    work = [(op_work(step.call), step.strategy.share < 1) for step in plan.steps]
    total = fsum(amount for amount, _ in work)
    by_shard = [0] * plan.shards
    for name, size in sizes.items():
        placement = plan.parameters.get(name, REPLICATE)
        for shard in range(plan.shards):
            if isinstance(placement, Shard):
                by_shard[shard] += size // placement.block_size * placement.sizes[shard]
            elif not isinstance(placement, OnRank) or placement.shard == shard:
                by_shard[shard] += size
    return ShardingReport(
        plan.shards,
        tuple(_Rows(plan, rules, sizes).rows(passes)),
        sum(sizes.values()),
        sum(size for name, size in sizes.items() if isinstance(plan.parameters.get(name), (Shard, OnRank))),
        fsum(amount for amount, sharded in work if sharded) / total if total else 0.0,
        tuple(by_shard),
    )


class _Rows:
    def __init__(self, plan: ShardingPlan, rules: ShardRules, sizes: Mapping[str, int]) -> None:
        self._plan, self._rules = plan, rules
        self._owners, self._calls = plan.graph.captured.owners, plan.graph.calls
        self._uncounted = dict(sizes)

    def rows(self, passes: int) -> Iterator[ShardingRow]:
        """Yield the rows of a batch; gradients are summed once, whatever the number of passes."""
        for row in self.of_a_pass():
            yield replace(row, collectives=row.collectives * passes, sent_bytes=row.sent_bytes * passes)
        values = {
            str(value.parameter): value
            for call in self._calls.values()
            for value in operator_parameters(call)
            if self._plan.parameters.get(str(value.parameter)) == PARTIAL_GRAD
        }
        if values:
            nbytes, shards = sum(value.nbytes for value in values.values()), self._plan.shards
            sent, what = round(2 * (shards - 1) / shards * nbytes), f"{len(values)} gradients"
            yield ShardingRow("", what, "partial → whole", backward="all-reduce", collectives=1, sent_bytes=sent)

    def of_a_pass(self) -> Iterator[ShardingRow]:
        for step in self._plan.steps:
            yield from self.redistributions(step.redistributions)
            named = step.strategy.name not in ("", BRANCH)
            if operator_parameters(step.call) or named or step.call.target is _ATTENTION:
                yield self.operator(step)
        # Outputs of the model are replicated at the end.
        present: dict[object, list[Placement]] = {}
        for step in self._plan.steps:
            for value, placement in zip(step.call.outputs, step.strategy.outputs, strict=True):
                present.setdefault(value.key, []).append(placement)
            for value, _, placement in step.redistributions:
                present.setdefault(value.key, []).append(placement)
        for value in self._plan.graph.outputs():
            known = frozenset(present.get(value.key, [REPLICATE]))
            if REPLICATE not in known:
                source = cheapest_source(value, known, self._plan.shards)
                yield from self.redistributions([(value, source, REPLICATE)])

    def operator(self, step: SearchStep) -> ShardingRow:
        call, strategy = step.call, step.strategy
        sharded = strategy.share < 1 or shards_a_parameter(call, strategy)
        cut = strategy.name or ("divided" if sharded else "whole")
        owner = next((placement for placement in strategy.outputs if isinstance(placement, OnRank)), None)
        module = module_of(call, self._owners)
        return ShardingRow(
            module,
            operator_name(call.target),
            cut if owner is None else f"{cut} {owner}",
            sum(self._uncounted.pop(str(value.parameter), 0) for value in call.inputs),
            f"{strategy.collectives} within" if strategy.collectives else "",
            collectives=strategy.collectives,
            sent_bytes=round(strategy.sent_bytes),
            why_whole=why_replicated(call, self._rules.of(module)) if cut == "whole" else "",
        )

    def redistributions(self, redistributions: Iterable[Redistribution]) -> Iterator[ShardingRow]:
        """Yield a row for each redistribution that communicates."""
        for value, before, after in redistributions:
            cost = redistribution_cost(before, after, self._plan.shards, differentiable=value.differentiable)
            if cost is None or not cost.number:
                continue
            node, (forward, backward) = value.node, cost.collectives
            computed = node in self._calls
            yield ShardingRow(
                module_of(self._calls[node], self._owners) if computed else self._owners.get(node.name, ""),
                operator_name(node.target) if computed else node.name,
                f"{_PLACEMENTS[type(before)]} → {_PLACEMENTS[type(after)]}",
                forward=forward,
                backward=backward,
                collectives=cost.number,
                sent_bytes=round((cost.forward + cost.backward) * value.nbytes),
            )


def operator_name(target: Any) -> str:
    """Return an operator's name, without its namespace and overload.

    >>> import torch
    >>> operator_name(torch.ops.aten.linear.default)
    'linear'
    """
    words = str(target).split(".")
    return words[1] if words[0] == "aten" and len(words) > 1 else str(target)


def why_replicated(call: OpCall, requested: str | None) -> str:
    """Explain why every shard does all of an operator.

    Args:
        call: the operator.
        requested: what the strategy's ``shard_rules`` request for its module.
    """
    if requested == WHOLE:
        return "shard_rules say so"
    if operator_name(call.target).removesuffix("_cell") in _RECURRENT:
        return "its hidden units would have to be gathered in every time step"
    if rule_of(call.target) is None:
        return f"no rule for {operator_name(call.target)}"
    few = _too_few(call)
    if few:
        return f"{few} can't be divided among {call.shards}"
    return "dividing it would cost more than it saves"


def _too_few(call: OpCall) -> str:
    """Name the units of which there are fewer than shards; "": there are enough, or their number is not the reason."""
    if call.target is _ATTENTION:
        heads = call.inputs[0].shape[-3] if call.inputs[0].dims > 3 else call.shards
        count, units = heads, "heads"
        if heads >= call.shards:
            return ""
    else:
        if any(shards_a_parameter(call, strategy) for strategy in rule_strategies(call, call.shards)):
            return ""
        alone = (strategy.name for strategy in rule_strategies(call, 1) if shards_a_parameter(call, strategy))
        counts = [(largest_count(call, name, call.shards), name) for name in dict.fromkeys(alone)]
        if not counts:
            return ""
        count, name = max(counts, key=lambda each: each[0])
        units = _UNITS.get(name, "units")
    return f"{count} {units if count > 1 else units.removesuffix('s')}"
