"""A cut as plain text for a terminal."""

import math
from collections import Counter
from collections.abc import Sequence

from torch.fx import Node

from paceline.core.formatting import amount
from paceline.replica.pipeline.base import Cut, Part
from paceline.replica.pipeline.costs import Costs
from paceline.replica.pipeline.cut_groups import Units

_GAP = "  "
_TITLES = ("stage", "columns", "from", "to", "time", "parameters", "sends", "tied")
_RIGHT = ("stage", "columns", "time", "parameters")


def table(cut: Cut, units: Units, costs: Costs, turns: Sequence[int] = ()) -> str:
    """One line a part: what it runs, its share of the time, its parameters, what it sends where, and what is tied.

    Where several columns take turns at parts, ``turns`` says how many at each; the slowest part is that which keeps
    each of its columns busy longest. Names of modules, and of nodes in parentheses, can be written as ``cuts``::

        2 stages; slowest: 12.1 ms, forward and backward of one micro-batch; bytes sent: of one micro-batch, forward

        stage  from             to               time  parameters  sends          tied
            0  transformer.wte  transformer.h.2  49 %      12,544  to 1: 36.9 kB  transformer.wte.weight (also 1)
            1  ...
    """
    seconds = [_seconds(part, units, costs) for part in cut.parts]
    turns = turns or [1] * len(seconds)
    lines = [_cells(part, cut, units, costs, seconds) for part in cut.parts]
    if max(turns) > 1:
        lines = [(line[0], str(count), *line[2:]) for line, count in zip(lines, turns, strict=True)]
    many = f"{len(lines)} stage{'s' if len(lines) > 1 else ''}"
    longest = max(each / count for each, count in zip(seconds, turns, strict=True))
    slowest = f"{longest * 1e3:.3g} ms, forward and backward of one micro-batch"
    head = f"{many}; slowest: {slowest}; bytes sent: of one micro-batch, forward"
    shown = [i for i in range(len(_TITLES)) if any(line[i] for line in lines)]
    rows = [[row[i] for i in shown] for row in (_TITLES, *lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join([head, "", *(_line(row, [_TITLES[i] for i in shown], widths) for row in rows)])


def _line(cells: Sequence[str], titles: Sequence[str], widths: Sequence[int]) -> str:
    placed = (
        cell.rjust(width) if title in _RIGHT else cell.ljust(width)
        for cell, title, width in zip(cells, titles, widths, strict=True)
    )
    return _GAP.join(placed).rstrip()


def _cells(part: Part, cut: Cut, units: Units, costs: Costs, seconds: Sequence[float]) -> tuple[str, ...]:
    total = sum(seconds)
    share = f"{seconds[part.number] / total:.0%}".replace("%", " %") if total else ""
    sent = Counter[int]()
    for crossing in part.sent:
        for consumer in crossing.consumers:
            sent[consumer] += costs.sizes.get(crossing.name, 0)
    tied = (
        f"{name} (also {', '.join(str(other) for other in where if other != part.number)})"
        for name, where in cut.tied.items()
        if part.number in where
    )
    return (
        str(part.number),
        "",
        *_ends(part, units),
        share,
        f"{sum(p.numel() for p in part.module.parameters()):,}",
        ", ".join(f"to {consumer}: {amount(sent[consumer])}" for consumer in sorted(sent)),
        ", ".join(tied),
    )


def _own(part: Part, units: Units) -> list[int]:
    """The units of a part."""
    names = {node.name for node in part.module.graph.nodes if node.op.startswith("call")}
    return sorted({unit for name, unit in units.nodes().items() if name in names})


def _seconds(part: Part, units: Units, costs: Costs) -> float:
    return math.fsum(costs.row.seconds[unit] for unit in _own(part, units))


def _ends(part: Part, units: Units) -> tuple[str, str]:
    """What a part begins and ends with."""
    own = _own(part, units)
    inside = set(own)
    return _name(units.groups[own[0]][0], units, inside), _name(units.groups[own[-1]][-1], units, inside)


def _name(node: Node, units: Units, inside: set[int]) -> str:
    """The largest module around a node that lies in the part as a whole; if none does, its own and the node's name."""
    owner = units.captured.owners.get(node.name, "")
    names = owner.split(".") if owner else []
    for length in range(1, len(names) + 1):
        name = ".".join(names[:length])
        if _units_of(name, units) <= inside:
            return name
    return f"{owner} ({node.name})" if owner else node.name


def _units_of(module: str, units: Units) -> set[int]:
    owners = units.captured.owners
    return {u for node, u in units.place.items() if f"{owners.get(node.name, '')}.".startswith(f"{module}.")}
