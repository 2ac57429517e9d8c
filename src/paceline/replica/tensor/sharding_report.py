"""Report of a sharding plan as rows and plain text: how each operator is sharded, what is sent, what stays whole.

::

    module  operator  cut              parameters  forward     backward    sends  whole because
            inputs    whole → shared                           all-reduce  512 B
    0       linear    column                  576
    2       linear    row                     520
    2       linear    partial → whole              all-reduce              512 B

A row without parameters that has an arrow is the redistribution of what that operator made, for the next one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any

from paceline.core.formatting import amount
from paceline.replica.tensor import sharding_plan
from paceline.replica.tensor.base import OpCall, aten, rule_of
from paceline.replica.tensor.branch_on_rank import BRANCH
from paceline.replica.tensor.op_times import op_work
from paceline.replica.tensor.placements import PARTIAL_GRAD, REPLICATE, OnRank, Placement, Shard
from paceline.replica.tensor.plan_search import SearchStep
from paceline.replica.tensor.redistribute import Redistribution, cheapest_source, redistribution_cost
from paceline.replica.tensor.sharding_plan import ShardingPlan, module_of, operator_parameters, shards_a_parameter
from paceline.shard_rules import WHOLE, ShardRules

_ATTENTION = aten.scaled_dot_product_attention.default

_UNITS = {"column": "outputs", "row": "inputs", "filters": "filters", "channels": "channels", "groups": "groups"}

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

# Names of placements without the dim or shard.
_SHORT: Mapping[type, str] = {Shard: "split", OnRank: "owned"}

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
    gap: str = ""
    """How far from the cheapest plan this one may be at most; empty: it is the cheapest."""

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
                row.module, row.operator, row.cut, f"{row.parameters:,}" if row.parameters else "", row.forward,
                row.backward, amount(row.sent_bytes) if row.sent_bytes else "", row.why_whole,
            )
            for row in self.rows
        ]  # fmt: skip
        columns = list[list[str]]()
        for title, *column in zip(_TITLES, *cells, strict=True):
            if any(column):
                width, pad = max(map(len, (title, *column))), str.rjust if title in _RIGHT else str.ljust
                columns.append([pad(cell, width) for cell in (title, *column)])
        lines = [f"{self.shards} shards; bytes: what a shard sends for one batch, forward and backward", ""]
        lines += ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
        share = self.divided_parameters / self.parameters if self.parameters else 0.0
        collectives = f"{self.collectives} collective{'s' if self.collectives != 1 else ''}"
        lines += [
            "",
            f"divided: {_percent(share)} of {self.parameters:,} parameters, {_percent(self.divided_work)} of the work",
            f"a step: {collectives}, {amount(self.sent_bytes)} sent by each shard",
            f"parameters by shard: {', '.join(f'{count:,}' for count in self.parameters_by_shard)}",
        ]
        if self.gap:
            lines.append(f"not known to be the cheapest plan: at most, {self.gap}")
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
        tuple(_Rows(plan, rules, sizes, passes).rows()),
        sum(sizes.values()),
        sum(size for name, size in sizes.items() if isinstance(plan.parameters.get(name), (Shard, OnRank))),
        fsum(amount for amount, sharded in work if sharded) / total if total else 0.0,
        tuple(by_shard),
        plan.gap,
    )


class _Rows:
    def __init__(self, plan: ShardingPlan, rules: ShardRules, sizes: Mapping[str, int], passes: int) -> None:
        self._plan, self._rules, self._passes = plan, rules, passes
        self._owners, self._calls = plan.graph.captured.owners, plan.graph.calls
        self._uncounted = dict(sizes)

    def rows(self) -> Iterator[ShardingRow]:
        """Yield the rows of a batch; gradients are summed once, whatever the number of passes."""
        present = defaultdict[object, set[Placement]](set)
        for step in self._plan.steps:
            call, strategy = step.call, step.strategy
            yield from self._redistributions(step.redistributions)
            if operator_parameters(call) or strategy.name not in ("", BRANCH) or call.target is _ATTENTION:
                yield self._operator(step)
            for value, placement in zip(call.outputs, strategy.outputs, strict=True):
                present[value.key].add(placement)
            for value, _, placement in step.redistributions:
                present[value.key].add(placement)
        for value in self._plan.graph.outputs():  # they are replicated at the end
            sources = frozenset(present.get(value.key, {REPLICATE}))
            if REPLICATE not in sources:
                source = cheapest_source(value, sources, self._plan.shards)
                yield from self._redistributions([(value, source, REPLICATE)])
        parameters = (value for call in self._calls.values() for value in operator_parameters(call))
        nbytes = {
            value.parameter: value.nbytes
            for value in parameters
            if self._plan.parameters.get(str(value.parameter)) == PARTIAL_GRAD
        }
        if nbytes:
            sent = round(2 * (self._plan.shards - 1) / self._plan.shards * sum(nbytes.values()))
            cut, operator = "partial → whole", f"{len(nbytes)} gradients"
            yield ShardingRow("", operator, cut, backward="all-reduce", collectives=1, sent_bytes=sent)

    def _operator(self, step: SearchStep) -> ShardingRow:
        call, strategy = step.call, step.strategy
        sharded = strategy.share < 1 or shards_a_parameter(call, strategy)
        cut = strategy.name or ("divided" if sharded else "whole")
        owner = next((placement for placement in strategy.outputs if isinstance(placement, OnRank)), None)
        module = module_of(call, self._owners)
        return ShardingRow(
            module,
            call.op_name,
            cut if owner is None else f"{cut} {owner}",
            sum(self._uncounted.pop(str(value.parameter), 0) for value in call.inputs),
            f"{strategy.collectives} within" if strategy.collectives else "",
            collectives=strategy.collectives * self._passes,
            sent_bytes=round(strategy.sent_bytes) * self._passes,
            why_whole=why_replicated(call, self._rules.of(module)) if cut == "whole" else "",
        )

    def _redistributions(self, redistributions: Iterable[Redistribution]) -> Iterator[ShardingRow]:
        """Yield a row for each redistribution that communicates."""
        for value, before, after in redistributions:
            cost = redistribution_cost(before, after, self._plan.shards, differentiable=value.differentiable)
            if cost is not None and cost.number:
                call, name = self._calls.get(value.node), value.node.name
                yield ShardingRow(
                    module_of(call, self._owners) if call else self._owners.get(name, ""),
                    call.op_name if call else name,
                    " → ".join(
                        {Shard: "split", OnRank: "owned"}.get(type(each), str(each)) for each in (before, after)
                    ),
                    forward=cost.collectives[0],
                    backward=cost.collectives[1],
                    collectives=cost.number * self._passes,
                    sent_bytes=round((cost.forward + cost.backward) * value.nbytes) * self._passes,
                )


def why_replicated(call: OpCall, requested: str | None) -> str:
    """Explain why every shard does all of an operator.

    Args:
        call: the operator.
        requested: what the strategy's ``shard_rules`` request for its module.
    """
    if requested == WHOLE:
        return "shard_rules say so"
    if call.op_name.removesuffix("_cell") in _RECURRENT:
        return "its hidden units would have to be gathered in every time step"
    if rule_of(call.target) is None:
        return f"no rule for {call.op_name}"
    few = _too_few(call)
    return f"{few} can't be divided among {call.shards}" if few else "dividing it would cost more than it saves"


def _too_few(call: OpCall) -> str:
    """Name the units of which there are fewer than shards; "": there are enough, or their number is not the reason."""
    if call.target is _ATTENTION:
        count, units = call.inputs[0].shape[-3] if call.inputs[0].dims > 3 else call.shards, "heads"
        if count >= call.shards:
            return ""
    else:
        if any(shards_a_parameter(call, strategy) for strategy in sharding_plan.rule_strategies(call, call.shards)):
            return ""
        alone = (
            strategy.name for strategy in sharding_plan.rule_strategies(call, 1) if shards_a_parameter(call, strategy)
        )
        counts = [(sharding_plan.largest_count(call, name, call.shards), name) for name in dict.fromkeys(alone)]
        if not counts:
            return ""
        count, name = max(counts, key=lambda each: each[0])
        units = _UNITS.get(name, "units")
    return f"{count} {units if count > 1 else units.removesuffix('s')}"
