"""Models that are cut by hand: traced with their children as they are, and cut between two nodes."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.program import leaves
from paceline.replica.pipeline.cut import Crossing, Cut, Part, cut
from paceline.replica.pipeline.cut_groups import Units


class Children(fx.Tracer):
    """Children are called whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return "." not in module_qualified_name


@dataclass(frozen=True)
class Form:
    """The part of Captured, and of its InputSpec, that describes inputs and outputs."""

    module: fx.GraphModule

    @property
    def input_spec(self) -> "Form":
        return self

    def flatten(self, inputs: Any) -> list[Tensor]:
        return leaves(inputs)

    def rebuild(self, found: Sequence[Tensor]) -> Any:
        return found[0] if len(found) == 1 else tuple(found)


def by_hand(module: nn.Module, borders: Sequence[str]) -> Cut:
    """Cut before the nodes of these names."""
    tracer = Children()
    graph = tracer.trace(module)
    where: dict[fx.Node, int] = {}
    nodes = [n for n in graph.nodes if n.op.startswith("call")]
    assert {n.name for n in nodes} >= set(borders), [n.name for n in nodes]
    part = 0
    for node in nodes:
        part += node.name in borders
        where[node] = part
    crossings = [crossing for node in nodes if (crossing := _crossing(node, where)).consumers]
    parts = [_part(k, module, graph, where, crossings, last=k == len(borders)) for k in range(len(borders) + 1)]
    holders: dict[int, dict[str, list[int]]] = {}
    for each in parts:
        for name, parameter in each.module.named_parameters():
            holders.setdefault(id(parameter), {}).setdefault(name, []).append(each.number)
    tied = {name: tuple(who) for names in holders.values() for name, who in names.items() if len(who) > 1}
    form: Any = Form(fx.GraphModule(module, graph))
    return Cut(form, tuple(parts), tied)


def evenly(units: Units, parts: int) -> Callable[[], Cut]:
    """Makes parts of equally many units, as :func:`own` does."""
    count = len(units.groups)
    return own(cut(units, [count * k // parts for k in range(1, parts)]))


def own(made: Cut) -> Callable[[], Cut]:
    """Makes its parts, each time with tensors of their own, as in a process of its own."""

    def copied() -> Cut:
        modules = copy.deepcopy([part.module for part in made.parts])
        return replace(made, parts=tuple(replace(p, module=m) for p, m in zip(made.parts, modules, strict=True)))

    return copied


def _crossing(node: fx.Node, where: dict[fx.Node, int]) -> Crossing:
    later = {where[user] for user in node.users if user in where} - {where[node]}
    return Crossing(node.name, where[node], tuple(sorted(later)))


def _part(
    number: int, module: nn.Module, whole: fx.Graph, where: dict[fx.Node, int], crossings: list[Crossing], *, last: bool
) -> Part:
    inside = [n for n in where if where[n] == number]
    (output,) = (n for n in whole.nodes if n.op == "output")
    results = [output.args[0]] if isinstance(output.args[0], fx.Node) else list(output.args[0])
    read = [i for n in inside for i in n.all_input_nodes]
    placeholders = [n for n in whole.nodes if n.op == "placeholder"]
    inputs = tuple(k for k, n in enumerate(placeholders) if n in read or (last and n in results))
    received = tuple(c for c in crossings if number in c.consumers)
    sent = tuple(c for c in crossings if c.source == number)
    by_name = {n.name: n for n in where}
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for n in [placeholders[k] for k in inputs] + [by_name[c.name] for c in received]:
        new[n] = graph.placeholder(n.name)
    for n in whole.nodes:
        if (n.op == "get_attr" and n in read) or n in inside:
            new[n] = graph.node_copy(n, lambda old: new[old])
    graph.output(tuple(new[by_name[c.name]] for c in sent) + (tuple(new[n] for n in results) if last else ()))
    return Part(number, fx.GraphModule(_only(module, graph), graph), inputs, received, sent)


def _only(module: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    used: dict[str, Any] = {}
    for n in graph.nodes:
        if n.op == "call_module":
            used[n.target] = module.get_submodule(n.target)
        elif n.op == "get_attr":
            path, _, name = n.target.rpartition(".")
            used[n.target] = getattr(module.get_submodule(path), name)
    return used


class Chain(nn.Module):
    """Layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        for k in range(4):
            setattr(self, f"l{k}", nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(self.l2(self.l1(self.l0(x))))


class Skips(nn.Module):
    """Values that pass over parts, one of them used twice; a mask; a number; an input that only the end needs; a value
    that is used, but not for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.l0, self.l1, self.l2, self.l3 = (nn.Linear(6, 6) for _ in range(4))
        self.gain = nn.Parameter(torch.full((6,), 1.5))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        a = torch.tanh(self.l0(x))
        mask = a > 0.1
        width = a.size(1)
        b = torch.relu_(self.l1(a)) + a
        c = torch.sin(self.l2(b)).t()
        unused = self.gain * b.detach()
        d = torch.where(mask, c.t(), a * b)
        return self.l3(d) * self.gain / width + a + y, (unused * 0).detach() + c.t().detach()


class Tied(nn.Module):
    """One weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.l1, self.l2 = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.l1(self.embed(x)))
        h = torch.tanh(self.l2(h)).mean(1)
        return torch.matmul(h, self.embed.weight.t())


class Norms(nn.Module):
    """Convolutions, and BatchNorm of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.l0 = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.l1 = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU())
        self.l2 = nn.Sequential(nn.Flatten(), nn.Linear(16, 5, bias=False), nn.BatchNorm1d(5, momentum=None))
        self.l3 = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(self.l2(self.l1(self.l0(x))))


BORDERS: dict[type[nn.Module], dict[int, tuple[str, ...]]] = {
    Chain: {1: (), 2: ("l2",), 3: ("l1", "l2"), 4: ("l1", "l2", "l3")},
    Skips: {
        1: (),
        2: ("l2",),
        3: ("l1", "where"),
        4: ("l1", "l2", "where"),
        6: ("l1", "l2", "sin", "where", "l3"),
        8: ("gt", "l1", "l2", "sin", "where", "l3", "add_1"),
    },
    Tied: {1: (), 2: ("l2",), 3: ("l1", "mean"), 4: ("l1", "l2", "matmul")},
    Norms: {1: (), 2: ("l2",), 3: ("l1", "l3"), 4: ("l1", "l2", "l3")},
}
"""Model -> parts -> where they begin."""
