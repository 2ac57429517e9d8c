"""Measured costs of each unit of a captured model: time forward and backward, bytes sent, held and saved.

Each node is run by itself on one micro-batch: on detached inputs, so that its backward is ``autograd.grad`` of its own
output, with gradients of one. The whole graph is interpreted several times, so that what disturbs a machine for a while
disturbs all nodes alike.
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
from paceline.replica.pipeline.partition import SharedItem, UnitCosts


class NodeTime(NamedTuple):
    """Seconds of one node by itself."""

    forward: Seconds = 0.0
    backward: Seconds = 0.0


class OperatorTimer:
    """Times operators on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        source = torch.zeros(1, device=device, requires_grad=True)
        # The time to call autograd at all, which a step spends only once.
        self._empty = statistics.median(self._backward(source.view(1), [source]) for _ in range(99))

    def time(self, call: Callable[[], Tree], sources: Sequence[Tensor]) -> tuple[Tree, NodeTime]:
        """Return what ``call`` returns, and the times of it and of its backward to ``sources``."""
        began = self._now()
        output = call()
        forward = self._now() - began
        return output, NodeTime(forward, max(0.0, self._backward(output, sources) - self._empty))

    def _backward(self, output: Tree, sources: Sequence[Tensor]) -> Seconds:
        ends = [tensor for tensor in leaves(output) if tensor.requires_grad]
        if not ends or not sources:
            return 0.0
        # Any gradients do: the time of a backward does not depend on their values.
        ones = [torch.ones_like(tensor) for tensor in ends]
        began = self._now()
        torch.autograd.grad(ends, sources, ones, allow_unused=True)
        return self._now() - began

    def _now(self) -> Seconds:
        if self._device.type != "cpu":  # kernels run asynchronously
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, the same for all its views; 0 where it has no strided storage."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


class SavedBytes:
    """The memory that backward needs, each storage once, however many units have saved it."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        self._own = {address(tensor) for tensor in own}
        self._alive: dict[int, Tensor] = {}
        self._shared: dict[int, tuple[int, set[int]]] = {}
        self._unshared: list[SharedItem] = []

    def add(self, unit: int | None, saved: Mapping[int, int], results: Iterable[Tensor]) -> None:
        """Add what :func:`saving` has recorded while a node of this unit ran, with these results."""
        # Kept until the end, so that their addresses are not used again.
        for tensor in results:
            self._alive.setdefault(address(tensor), tensor)
        for storage, size in saved.items():
            if unit is None or storage in self._own:
                continue
            if storage in self._alive:
                self._shared.setdefault(storage, (size, set()))[1].add(unit)
            else:
                self._unshared.append(SharedItem(size, (unit,)))

    def first_users(self, values: "Values") -> dict[tuple[str, int], int]:
        """Return (name of a node, index among its results) -> the first unit that keeps its memory for backward."""
        places = ((node.name, n, address(t)) for node, v in values.items() for n, t in enumerate(leaves(v)))
        return {(name, index): min(self._shared[at][1]) for name, index, at in places if at in self._shared}

    def items(self) -> list[SharedItem]:
        """Return all of it, without the model's own tensors."""
        shared = [SharedItem(size, tuple(sorted(users))) for size, users in self._shared.values()]
        return [item for item in (*shared, *self._unshared) if item.nbytes]


@contextmanager
def saving() -> Iterator[dict[int, int]]:
    """Context manager: yield address -> bytes of storages that autograd saves within; a view keeps all of its base."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        saved[address(tensor)] = tensor.untyped_storage().nbytes() if address(tensor) else size
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


# A value for each node that another one reads.
Values: TypeAlias = Mapping[Node, Any]


class NodeInterpreter:
    """One pass through a graph on one batch."""

    def __init__(self, graph: GraphModule, batch: Sequence[Tensor]) -> None:
        self._graph = graph
        self._batch = iter(batch)
        self.values: dict[Node, Any] = {}
        """The value of each node; one that needs a gradient begins a history of its own."""

    def run_watched(self, node: Node, unit: int | None, ledger: SavedBytes) -> None:
        """Run a node, and add what it saves for backward to those of its unit."""
        isolated = _Isolated(node, self.values, self._graph)
        with saving() as saved:
            output = self._call(node, isolated.values) if node.op.startswith("call") else None
        self._commit(node, isolated, output)
        sizes = {isolated.originals.get(at, at): size for at, size in saved.items()}
        ledger.add(unit, sizes, leaves(self.values[node]))

    def run_timed(self, node: Node, timer: OperatorTimer) -> NodeTime:
        """Run a node; returns the seconds of its forward and backward."""
        isolated, output, taken = _Isolated(node, self.values, self._graph), None, NodeTime()
        if node.op.startswith("call"):
            output, taken = timer.time(functools.partial(self._call, node, isolated.values), isolated.sources)
        self._commit(node, isolated, output)
        return taken

    def _commit(self, node: Node, isolated: "_Isolated", output: Tree) -> None:
        """Set the values that the nodes after this one will read."""
        if node.op == "placeholder":
            self.values[node] = next(self._batch).detach().clone()
        elif node.op == "get_attr":
            self.values[node] = _detached(attribute(node, self._graph))
        elif not isolated.copied:
            self.values[node] = _detached(output)
        else:
            # It has written copies: now the tensors themselves, and the first run shows which need a gradient.
            with torch.no_grad():
                written_output = self._call(node, self.values)
            self.values |= {each: _detached(self.values[each], like=v) for each, v in isolated.values.items()}
            self.values[node] = _detached(written_output, like=output)

    def _call(self, node: Node, values: Values) -> Tree:
        args, kwargs = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
        module = child(node, self._graph)
        function = module if module is not None else node.target
        assert callable(function), "what is no module is a function"
        return function(*args, **kwargs)


class _Isolated:
    """Values that a node can be run on once: with gradients of their own, and copies of those that it writes."""

    def __init__(self, node: Node, values: Values, graph: GraphModule) -> None:
        self.values = {each: _detached(values[each]) for each in node.all_input_nodes}
        module, targets = child(node, graph), written(node, graph)
        self.sources = [t for value in self.values.values() for t in leaves(value) if t.requires_grad]
        self.sources += [p for p in module.parameters() if p.requires_grad] if module is not None else []
        self.copied = bool(targets)
        self.originals: dict[int, int] = {}
        """Address of a copy -> that of its original."""
        for target in dict.fromkeys(targets):
            original, self.values[target] = self.values[target], map_tree(torch.clone, self.values[target])
            for copy, tensor in zip(leaves(self.values[target]), leaves(original), strict=True):
                self.originals[address(copy)] = address(tensor)


def _detached(value: Any, like: Any = None) -> Any:
    """Return the same tensors without a history, beginning one where they, or those in ``like``, need a gradient."""
    needs = iter([t.requires_grad for t in leaves(value if like is None else like)])
    return map_tree(lambda t: t.detach().requires_grad_(next(needs)), value)


@dataclass(frozen=True)
class Costs:
    """Costs of one model for one micro-batch.

    Args:
        sizes: name of a node -> bytes of the tensor that it computes.
        nodes: name of a node that is in a unit -> its time by itself.
        kept: (name of a node, index among its results) -> the first unit that keeps it for backward.
    """

    units: UnitCosts
    sizes: Mapping[str, int]
    nodes: Mapping[str, NodeTime] = field(default_factory=dict[str, NodeTime])
    kept: Mapping[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])


# Passes that are always made: the lower one of two times is right where one of the passes was disturbed.
LEAST = 2


def measure(units: Units, batch: Sequence[Tensor], repeats: int = 5, enough_s: Seconds = math.inf) -> Costs:
    """Run each node ``repeats`` times, forward and backward, and take the median; of an even number, the lower one.

    It takes about ``repeats`` + 1 steps of the model, and the memory of one. Parameters, buffers and random state are
    restored. The time to call autograd for one node is measured on an empty one and subtracted: a step calls it once.

    Args:
        units: of the captured model.
        batch: the leaves of a micro-batch's input, as ``Captured.flatten`` returns them.
        repeats: at least 1.
        enough_s: seconds after which no other pass is begun, once :data:`LEAST` have been made.
    """
    graph = units.captured.module
    ledger = SavedBytes([*graph.parameters(), *graph.buffers()])
    # The first pass warms up and counts bytes; times are those of the passes after it.
    times: dict[Node, list[NodeTime]] = {node: [] for node in units.place}
    with preserve_state(graph):
        interpreter = NodeInterpreter(graph, batch)
        for node in graph.graph.nodes:
            interpreter.run_watched(node, units.place.get(node), ledger)
        sizes = {
            node.name: value.numel() * value.element_size()
            for node, value in interpreter.values.items()
            if isinstance(value, Tensor)
        }
        kept = ledger.first_users(interpreter.values)
        del interpreter  # its values, before the next pass has as many
        timer = OperatorTimer(next((t.device for t in (*batch, *graph.parameters())), torch.device("cpu")))
        began = time.perf_counter()
        for made in range(repeats):
            if made >= LEAST and time.perf_counter() - began > enough_s:
                break
            interpreter = NodeInterpreter(graph, batch)
            for node in graph.graph.nodes:
                taken = interpreter.run_timed(node, timer)
                if node in times:
                    times[node].append(taken)
    seconds = [math.fsum(statistics.median_low(map(sum, times[node])) for node in group) for group in units.groups]
    medians = {n.name: NodeTime(*map(statistics.median_low, zip(*each, strict=True))) for n, each in times.items()}
    counted = UnitCosts(seconds, _values(units, sizes), _parameters(units), ledger.items())
    return Costs(counted, sizes, medians, kept)


def _values(units: Units, sizes: Mapping[str, int]) -> list[SharedItem]:
    """Return the values that units compute for others; the model's output is used by the last."""
    uses: dict[Node, set[int]] = {}
    for reader in units.captured.module.graph.nodes:
        unit = len(units.groups) - 1 if reader.op == "output" else units.place.get(reader)
        for node in inputs(reader) if unit is not None else ():
            if unit is not None and units.place.get(node, unit) != unit:
                uses.setdefault(node, set()).add(unit)
    return [SharedItem(sizes.get(node.name, 0), tuple(sorted(by)), units.place[node]) for node, by in uses.items()]


def _parameters(units: Units) -> list[SharedItem]:
    """Return the parameters, each with the units that use it."""
    graph = units.captured.module
    users: dict[nn.Parameter, set[int]] = {p: set() for p in graph.parameters()}
    for node, unit in units.place.items():
        module = child(node, graph)
        read = [attribute(each, graph) for each in node.all_input_nodes if each.op == "get_attr"]
        for parameter in (*read, *(module.parameters() if module is not None else ())):
            if isinstance(parameter, nn.Parameter):
                users[parameter].add(unit)
    return [SharedItem(p.numel() * p.element_size(), tuple(sorted(by))) for p, by in users.items() if by]
