"""Measure what each unit of a captured model costs: time forward and backward, bytes saved.

How many bytes are saved for backward, and by which units.

A graph gone through node by node, each on inputs without a history, so that each can be watched by itself.

What each unit of a captured model costs: measured on one micro-batch, each node by itself.

A node is run on detached inputs, so its backward is its own: ``autograd.grad`` of what it makes, with gradients of one.
The whole graph is gone through several times, so that what disturbs a machine for a while disturbs all nodes alike.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from paceline.core.types import Seconds
from paceline.program import Tree, leaves, map_tree
from paceline.replica.module_utils import preserve_state
from paceline.replica.pipeline.cut_groups import Units
from paceline.replica.pipeline.graph_nodes import attribute, child, inputs, written
from paceline.replica.pipeline.partition import CutRow, Item


class Taken(NamedTuple):
    """By an operator."""

    forward: Seconds = 0.0
    backward: Seconds = 0.0


class OperatorTimer:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        source = torch.zeros(1, device=device, requires_grad=True)
        self._empty = statistics.median(self._backward(source.view(1), [source]) for _ in range(99))

    def time(self, call: Callable[[], Tree], sources: Sequence[Tensor]) -> tuple[Tree, Taken]:
        """What ``call`` returns, and how long it and its backward to ``sources`` take."""
        began = self._now()
        made = call()
        forward = self._now() - began
        return made, Taken(forward, max(0.0, self._backward(made, sources) - self._empty))

    def _backward(self, made: Tree, sources: Sequence[Tensor]) -> Seconds:
        ends = [tensor for tensor in leaves(made) if tensor.requires_grad]
        if not ends or not sources:
            return 0.0
        ones = [torch.ones_like(tensor) for tensor in ends]
        began = self._now()
        torch.autograd.grad(ends, sources, ones, allow_unused=True)
        return self._now() - began

    def _now(self) -> Seconds:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


def nbytes(tensor: Tensor) -> int:
    """Of its elements.

    >>> nbytes(torch.zeros(2, 3))
    24
    """
    return tensor.numel() * tensor.element_size()


def address(tensor: Tensor) -> int:
    """Where its memory lies: the same for all views of one tensor. 0 where it has none of its own kind."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


class SavedBytes:
    """Memory that backward needs, each piece once, however many units have saved it."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        self._own = {address(tensor) for tensor in own}
        self._kept: dict[int, Tensor] = {}
        self._users: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}
        self._alone: list[Item] = []

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """These are there until the end, so that an address of theirs stands for nothing else."""
        for tensor in tensors:
            self._kept.setdefault(address(tensor), tensor)

    def enter(self, unit: int, saved: Mapping[int, int]) -> None:
        """What :func:`saving` has seen while a node of this unit ran."""
        for where, size in saved.items():
            if where in self._own:
                continue
            if where in self._kept:
                self._sizes[where] = size
                self._users.setdefault(where, set()).add(unit)
            else:
                self._alone.append(Item(size, (unit,)))

    def items(self) -> list[Item]:
        """All of it, without the model's own tensors."""
        shared = [Item(self._sizes[where], tuple(sorted(users))) for where, users in self._users.items()]
        return [item for item in (*shared, *self._alone) if item.nbytes]


@contextmanager
def saving() -> Iterator[dict[int, int]]:
    """Address -> bytes of the memory that autograd saves meanwhile; whole storages, since a view keeps its base."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[address(tensor)] = tensor.untyped_storage().nbytes() if address(tensor) else nbytes(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


Given: TypeAlias = Mapping[Node, Any]
"""What a node is run on: a value for each node that it reads."""


class NodeInterpreter:
    """One pass through a graph on one batch."""

    def __init__(self, graph: GraphModule, batch: Sequence[Tensor]) -> None:
        self._graph = graph
        self._batch = iter(batch)
        self.made: dict[Node, Any] = {}
        """What each node has made; what needs a gradient begins a history of its own."""

    def watched(self, node: Node, unit: int | None, ledger: SavedBytes) -> None:
        """Let a node make what it makes, and enter what it saves for backward as its unit's."""
        own = self._own(node)
        with saving() as saved:
            tried = self._call(node, own.values) if node.op.startswith("call") else None
        self._go_on(node, own, tried)
        ledger.keep(leaves(self.made[node]))
        if unit is not None:
            ledger.enter(unit, {own.original(where): size for where, size in saved.items()})

    def timed(self, node: Node, watch: OperatorTimer) -> Taken:
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


@dataclass(frozen=True)
class Costs:
    """Of the units of one model, for one micro-batch."""

    row: CutRow
    sizes: Mapping[str, int]
    """Name of a node -> bytes of the tensor that it makes."""
    nodes: Mapping[str, Taken] = field(default_factory=dict[str, Taken])
    """Name of a node that is in a unit -> what it takes by itself."""


def measure(units: Units, batch: Sequence[Tensor], repeats: int = 5) -> Costs:
    """Run each node ``repeats`` times, forward and backward, and take the median.

    It takes about ``repeats`` + 1 steps of the model, and the memory of one. Parameters, buffers and random state are
    as before when it is done. What it takes to ask autograd for the gradients of one node is measured on an empty one
    and subtracted: a step asks once for all.

    Args:
        units: of the captured model.
        batch: the leaves of a micro-batch's input, as ``Captured.flat`` gives them.
        repeats: at least 1.
    """
    graph = units.captured.module
    ledger = SavedBytes([*graph.parameters(), *graph.buffers()])
    with preserve_state(graph):
        first = NodeInterpreter(graph, batch)
        for node in graph.graph.nodes:
            first.watched(node, units.place.get(node), ledger)
        sizes = {node.name: nbytes(value) for node, value in first.made.items() if isinstance(value, Tensor)}
        del first
        nodes = _taken(units, batch, repeats)
    row = CutRow(_seconds(units, nodes), _values(units, sizes), _held(units), ledger.items())
    return Costs(
        row, sizes, {node.name: Taken(*map(statistics.median, zip(*nodes[node], strict=True))) for node in nodes}
    )


def _seconds(units: Units, nodes: Mapping[Node, Sequence[Taken]]) -> list[Seconds]:
    """Of each unit: the sum over its nodes of the medians of forward and backward together."""
    return [math.fsum(statistics.median(map(sum, nodes[node])) for node in group) for group in units.groups]


def _taken(units: Units, batch: Sequence[Tensor], repeats: int) -> Mapping[Node, Sequence[Taken]]:
    """Of each node, each time."""
    graph = units.captured.module
    watch = OperatorTimer(next((t.device for t in (*batch, *graph.parameters())), torch.device("cpu")))
    times: dict[Node, list[Taken]] = {node: [] for node in units.place}
    for _ in range(repeats):
        trial = NodeInterpreter(graph, batch)
        for node in graph.graph.nodes:
            taken = trial.timed(node, watch)
            if node in times:
                times[node].append(taken)
    return times


def _values(units: Units, sizes: Mapping[str, int]) -> list[Item]:
    """What units make for others; the model's output is used by the last."""
    uses: dict[Node, set[int]] = {}
    for reader in units.captured.module.graph.nodes:
        unit = len(units.groups) - 1 if reader.op == "output" else units.place.get(reader)
        for node in inputs(reader) if unit is not None else ():
            if unit is not None and units.place.get(node, unit) != unit:
                uses.setdefault(node, set()).add(unit)
    return [Item(sizes.get(node.name, 0), tuple(sorted(by)), units.place[node]) for node, by in uses.items()]


def _held(units: Units) -> list[Item]:
    """The parameters, each with the units that use it."""
    graph = units.captured.module
    users: dict[nn.Parameter, set[int]] = {p: set() for p in graph.parameters()}
    for node, unit in units.place.items():
        module = child(node, graph)
        got = [attribute(each, graph) for each in node.all_input_nodes if each.op == "get_attr"]
        for parameter in (*got, *(module.parameters() if module is not None else ())):
            if isinstance(parameter, nn.Parameter):
                users[parameter].add(unit)
    return [Item(nbytes(p), tuple(sorted(by))) for p, by in users.items() if by]
