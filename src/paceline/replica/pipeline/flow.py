"""Which nodes each part runs, and which values it receives."""

import bisect
from collections.abc import Sequence

from torch.fx import Node

from paceline.replica.pipeline.kinds import inputs
from paceline.replica.pipeline.units import Units


class Flow:
    """Units cut at boundaries.

    ::

        part     0                    1                       2
        makes    a, b                 c                       d
        needs    --                   a                       a, size of b, mask
        so       sends a to 1 and 2   receives a              receives a and the size; makes the mask itself
    """

    def __init__(self, units: Units, boundaries: Sequence[int]) -> None:
        self._units = units
        self._parts = range(len(boundaries) + 1)
        self._part_of = {node: bisect.bisect(boundaries, unit) for node, unit in units.place.items()}
        self._output = next(iter(reversed(units.captured.module.graph.nodes)))
        self.runs: list[set[Node]] = [set() for _ in self._parts]
        """Of each part: its units' nodes, and what it has of its own: leaves and what is done again."""
        self.receives: list[set[Node]] = [set() for _ in self._parts]
        for node, part in self._part_of.items():
            self.runs[part].add(node)
        for part in self._parts:
            for node in self._wanted(part):
                self._want(node, part)
        for part in reversed(self._parts):
            for node in self._wanted(part):
                if node in units.sizes:
                    self._want_size(node, part)

    def source(self, node: Node) -> int:
        """The part that makes what others receive."""
        if node in self._units.sizes:
            return max(map(self.source, inputs(node)), default=0)
        return self._part_of.get(node, 0)

    def consumers(self, node: Node) -> tuple[int, ...]:
        """The parts that receive it."""
        return tuple(part for part in self._parts if node in self.receives[part])

    def _wanted(self, part: int) -> list[Node]:
        """What the nodes of a part's units read; the last part gives the output."""
        readers = [node for node, number in self._part_of.items() if number == part]
        if part == self._parts[-1]:
            readers.append(self._output)
        return [each for reader in readers for each in inputs(reader)]

    def _want(self, node: Node, part: int) -> None:
        if node in self._part_of:
            if self._part_of[node] != part:
                self.receives[part].add(node)
        elif node not in self._units.sizes and node not in self.runs[part]:
            self.runs[part].add(node)
            for each in inputs(node):
                self._want(each, part)

    def _want_size(self, node: Node, part: int) -> None:
        """A number is computed from tensors that are there; where one isn't, the part that has them all sends it."""
        if node in self.receives[part] or node in self.runs[part]:
            return
        source = self.source(node)
        if part != source and not self._there(node, part):
            self.receives[part].add(node)
            self._want_size(node, source)
            return
        self.runs[part].add(node)
        for each in inputs(node):
            if each in self._units.sizes:
                self._want_size(each, part)
            else:
                self._want(each, part)

    def _there(self, node: Node, part: int) -> bool:
        """Whether a part has all that a node is computed from, or gets it anyway."""
        if node in self._part_of:
            return self._part_of[node] == part or node in self.receives[part]
        return node not in self._units.sizes or all(self._there(each, part) for each in inputs(node))
