"""A graph gone through node by node, each on inputs without a history, so that each can be watched by itself."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from paceline.program import Tree, leaves, map_tree
from paceline.replica.pipeline.effects import written
from paceline.replica.pipeline.kinds import attribute, child
from paceline.replica.pipeline.ledger import Ledger, address, saving
from paceline.replica.pipeline.stopwatch import Stopwatch, Taken

Given: TypeAlias = Mapping[Node, Any]
"""What a node is run on: a value for each node that it reads."""


class Trial:
    """One pass through a graph on one batch."""

    def __init__(self, graph: GraphModule, batch: Sequence[Tensor]) -> None:
        self._graph = graph
        self._batch = iter(batch)
        self.made: dict[Node, Any] = {}
        """What each node has made; what needs a gradient begins a history of its own."""

    def watched(self, node: Node, unit: int | None, ledger: Ledger) -> None:
        """Let a node make what it makes, and enter what it saves for backward as its unit's."""
        own = self._own(node)
        with saving() as saved:
            tried = self._call(node, own.values) if node.op.startswith("call") else None
        self._go_on(node, own, tried)
        ledger.keep(leaves(self.made[node]))
        if unit is not None:
            ledger.enter(unit, {own.original(where): size for where, size in saved.items()})

    def timed(self, node: Node, watch: Stopwatch) -> Taken:
        """Let a node make what it makes; returns the seconds of its forward and backward."""
        own, tried, taken = self._own(node), None, Taken()
        if node.op.startswith("call"):
            tried, taken = watch.time(functools.partial(self._call, node, own.values), own.sources)
        self._go_on(node, own, tried)
        return taken

    def _go_on(self, node: Node, own: "_Own", tried: Tree) -> None:
        """Keep what the nodes after this one will read."""
        if node.op == "placeholder":
            self.made[node] = next(self._batch).detach().clone()
        elif node.op == "get_attr":
            self.made[node] = _apart(attribute(node, self._graph))
        elif not own.copied:
            self.made[node] = _apart(tried)
        else:
            # It has written copies: now the tensors themselves, and what was tried tells which need a gradient.
            with torch.no_grad():
                made = self._call(node, self.made)
            self.made |= {each: _apart(self.made[each], like=value) for each, value in own.values.items()}
            self.made[node] = _apart(made, like=tried)

    def _own(self, node: Node) -> "_Own":
        own = _Own({each: self.made[each] for each in node.all_input_nodes}, written(node, self._graph))
        module = child(node, self._graph)
        if module is not None:
            own.sources.extend(p for p in module.parameters() if p.requires_grad)
        return own

    def _call(self, node: Node, given: Given) -> Tree:
        args, kwargs = map_arg(node.args, given.__getitem__), map_arg(node.kwargs, given.__getitem__)
        module = child(node, self._graph)
        function = module if module is not None else node.target
        assert callable(function), "what is no module is a function"
        return function(*args, **kwargs)


class _Own:
    """Values that a node can be run on once: with gradients of their own, and copies of what it writes."""

    def __init__(self, given: Given, targets: Sequence[Node]) -> None:
        self.values = {node: _apart(value) for node, value in given.items()}
        self.sources = [t for value in self.values.values() for t in leaves(value) if t.requires_grad]
        self.copied = bool(targets)
        self._originals: dict[int, int] = {}
        for node in dict.fromkeys(targets):
            original, self.values[node] = self.values[node], map_tree(torch.clone, self.values[node])
            for copy, tensor in zip(leaves(self.values[node]), leaves(original), strict=True):
                self._originals[address(copy)] = address(tensor)

    def original(self, where: int) -> int:
        """The address of what was copied to this one."""
        return self._originals.get(where, where)


def _apart(value: Any, like: Any = None) -> Any:
    """The same tensors without their history, beginning one where they, or those in ``like``, need a gradient."""
    needs = iter([t.requires_grad for t in leaves(value if like is None else like)])
    return map_tree(lambda t: t.detach().requires_grad_(next(needs)), value)
