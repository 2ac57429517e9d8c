"""A cut as text: one line for each part."""

import math
from collections import Counter
from collections.abc import Sequence

from torch.fx import Node

from paceline.core.formatting import aligned, amount
from paceline.replica.pipeline.costs import Costs
from paceline.replica.pipeline.cut import Cut
from paceline.replica.pipeline.cut_groups import Units

_TITLES = ("stage", "replicas", "from", "to", "time", "parameters", "sends", "tied")
_RIGHT = ("stage", "replicas", "time", "parameters")


def cut_table(cut: Cut, units: Units, costs: Costs, replicas: Sequence[int] = ()) -> str:
    """Return one line for each part: its ends, its share of the time, its parameters, bytes sent, and tied parameters.

    Where parts have several ``replicas``, their number is a column; the slowest part is that which keeps each of its
    replicas busy longest. Names of modules, and of nodes in parentheses, can be written as ``cuts``::

        2 stages; slowest: 12.1 ms, forward and backward of one micro-batch; bytes sent: of one micro-batch, forward

        stage  from             to               time  parameters  sends          tied
            0  transformer.wte  transformer.h.2  49 %      12,544  to 1: 36.9 kB  transformer.wte.weight (also 1)
            1  ...
    """
    unit_of = units.nodes()
    calls = [[node.name for node in part.module.graph.nodes if node.op.startswith("call")] for part in cut.parts]
    own = [sorted({unit_of[name] for name in names if name in unit_of}) for names in calls]
    seconds = [math.fsum(costs.units.seconds[unit] for unit in part) for part in own]
    replicas = replicas or [1] * len(seconds)
    total = sum(seconds)

    lines = []
    for part, inside, time, count in zip(cut.parts, own, seconds, replicas, strict=True):
        sent = Counter[int]()
        for crossing in part.sent:
            for consumer in crossing.consumers:
                sent[consumer] += costs.sizes.get(crossing.name, 0)
        tied = (
            f"{name} (also {', '.join(str(other) for other in holders if other != part.number)})"
            for name, holders in cut.tied.items()
            if part.number in holders
        )
        line = (
            str(part.number),
            str(count) if max(replicas) > 1 else "",
            _name(units.groups[inside[0]][0], units, set(inside)),
            _name(units.groups[inside[-1]][-1], units, set(inside)),
            f"{time / total:.0%}".replace("%", " %") if total else "",
            f"{sum(p.numel() for p in part.module.parameters()):,}",
            ", ".join(f"to {consumer}: {amount(sent[consumer])}" for consumer in sorted(sent)),
            ", ".join(tied),
        )
        lines.append(line)

    slowest = max(each / count for each, count in zip(seconds, replicas, strict=True))
    head = (
        f"{len(lines)} stage{'s' if len(lines) > 1 else ''}; slowest: {slowest * 1e3:.3g} ms, forward and backward of "
        "one micro-batch; bytes sent: of one micro-batch, forward"
    )
    shown = [i for i in range(len(_TITLES)) if any(line[i] for line in lines)]
    rows = [[row[i] for i in shown] for row in (_TITLES, *lines)]
    return "\n".join([head, "", *aligned(rows, _RIGHT)])


def _name(node: Node, units: Units, inside: set[int]) -> str:
    """Return the largest module around a node that is wholly in the part; if none is, its own and the node's name."""
    owners = units.captured.owners
    owner = owners.get(node.name, "")
    names = owner.split(".") if owner else []
    for length in range(1, len(names) + 1):
        name = ".".join(names[:length])
        of_module = {u for node, u in units.place.items() if f"{owners.get(node.name, '')}.".startswith(f"{name}.")}
        if of_module <= inside:
            return name
    return f"{owner} ({node.name})" if owner else node.name
