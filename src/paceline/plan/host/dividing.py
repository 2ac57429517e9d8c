"""How the units of a captured model are divided among shards, as rows of a profile."""

from collections.abc import Iterator, Sequence
from math import fsum

from paceline.plan.base import Collective
from paceline.plan.host.outlined import users
from paceline.plan.host.profile import Division, Line, Part, Sent
from paceline.replica.pipeline.costs import Costs
from paceline.replica.pipeline.units import Units
from paceline.replica.tensor import possible
from paceline.replica.tensor.base import Value
from paceline.replica.tensor.layouts import SHARED, Layout, Owned, Split
from paceline.replica.tensor.plan import Plan
from paceline.replica.tensor.prices import price
from paceline.replica.tensor.search import Step
from paceline.replica.tensor.table import backward_kind, forward_kind

_NAMED: dict[str, Collective] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
}
"""As tables call them; what goes to one or comes from one is counted as a broadcast."""


def division_of(units: Units, plan: Plan | str, shards: int, costs: Costs, samples: int) -> Division:
    """What the largest shard has of each unit.

    Args:
        units: of the captured model.
        plan: of the same graph, or why there is none.
        shards: k.
        costs: of its operators.
        samples: of the batch that was planned for.
    """
    if isinstance(plan, str):
        return Division(shards, refused=plan)
    return _Dividing(units, plan, costs, samples).all()


class _Dividing:
    def __init__(self, units: Units, plan: Plan, costs: Costs, samples: int) -> None:
        self._units, self._plan, self._costs, self._samples = units, plan, costs, samples
        self._steps: dict[int, list[Step]] = {unit: [] for unit in range(len(units.groups))}
        for step in plan.steps:
            unit = units.place.get(step.call.node)
            if unit is not None:
                self._steps[unit].append(step)
        self._sizes = {n: tensor.numel() for n, tensor in units.captured.module.named_parameters()}
        self._largest = max(range(plan.shards), key=lambda shard: sum(self._held(n, shard) for n in self._sizes))

    def all(self) -> Division:
        names: dict[int, list[str]] = {}
        for name, where in users(self._units).items():
            for unit in where:
                names.setdefault(unit, []).append(name)
        parts = tuple(self._part(unit, names.get(unit, ())) for unit in self._steps)
        return Division(self._plan.shards, parts, once=tuple(self._once()))

    def _part(self, unit: int, names: Sequence[str]) -> Part:
        steps = self._steps[unit]
        calls = [self._sent(step) for step in steps]
        return Part(
            self._work(unit),
            sum(self._held(name, self._largest) for name in names),
            self._kept(steps),
            tuple(sent for forward, _ in calls for sent in forward),
            tuple(sent for _, backward in calls for sent in backward),
        )

    def _work(self, unit: int) -> float:
        """The share of its seconds; what is no operator of the plan is done by every shard."""
        shares = {step.call.node: step.way.share for step in self._steps[unit]}
        times = [(sum(self._costs.nodes[node.name]), shares.get(node, 1.0)) for node in self._units.groups[unit]]
        total = fsum(spent for spent, _ in times)
        return fsum(spent * share for spent, share in times) / total if total else 1.0

    def _kept(self, steps: Sequence[Step]) -> float:
        """Of what goes through its operators, the share that a shard has."""
        through = [
            (value.nbytes, _share(layout))
            for step in steps
            for values, layouts in ((step.call.takes, step.way.takes), (step.call.gives, step.way.gives))
            for value, layout in zip(values, layouts, strict=True)
            if value.parameter is None
        ]
        total = sum(size for size, _ in through)
        return fsum(size * share for size, share in through) / total if total else 1.0

    def _held(self, name: str, shard: int) -> int:
        layout, size = self._plan.parameters.get(name), self._sizes[name]
        if isinstance(layout, Split):
            return size // layout.block * layout.sizes[shard]
        return 0 if isinstance(layout, Owned) and layout.shard != shard else size

    def _sent(self, step: Step) -> tuple[list[Sent], list[Sent]]:
        forward, backward = list[Sent](), list[Sent]()
        for value, before, after in step.converted:
            found = price(before, after, self._plan.shards, differentiable=value.differentiable)
            if found is not None and found.collectives[0]:
                forward.append(self._call(forward_kind(before, after), value))
            if found is not None and found.collectives[1]:
                backward.append(self._call(backward_kind(before, after), value))
        return [*forward, *self._within(step)], backward

    def _call(self, kind: str, value: Value) -> Sent:
        size = value.nbytes
        fixed = value.parameter is not None
        return Sent(_NAMED.get(kind, "broadcast"), Line(size, 0.0) if fixed else Line(0.0, size / self._samples))

    def _within(self, step: Step) -> Iterator[Sent]:
        """Those that the written operator makes itself: sums, as of a norm's statistics."""
        count, k = step.way.collectives, self._plan.shards
        for _ in range(count):
            yield Sent("all_reduce", Line(step.way.sent / count * k / (2 * (k - 1)), 0.0))

    def _once(self) -> Iterator[Sent]:
        """Gradients of parameters that all shards have and each uses for its part of the work."""
        values = {
            str(value.parameter): value.nbytes
            for call in self._plan.operators.calls.values()
            for value in possible.parameters(call)
            if self._plan.parameters.get(str(value.parameter)) == SHARED
        }
        if values:
            yield Sent("all_reduce", Line(sum(values.values()), 0.0))


def _share(layout: Layout) -> float:
    return layout.share if isinstance(layout, Split) else 1.0
