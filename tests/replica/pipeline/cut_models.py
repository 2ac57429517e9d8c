"""Small models with whatever makes cutting hard, and models of the zoo captured once."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import paceline.replica.capture.capture  # noqa: F401
from paceline.replica.capture.capture import Captured, capture
from paceline.replica.capture.input_spec import InputSpec, flatten_tree
from paceline.replica.pipeline.cut_groups import Units, group
from tests.zoo import ZOO, Job

aten = torch.ops.aten
cut = torch.ops.paceline.cut  # that cut_mark defines

CUTS = ("b2.0", "b2.2", "b3.0", "b3.2", "b4", "cat")
NEEDS = "0-1 0-3 0-5 0-6 1-2 2-6 3-4 4-6 5-6"
"""The trunk and the first branch, the two parts of the second and of the third, the fourth, and what joins them."""


def by_hand(tensors: dict[str, Tensor], build: Callable[[Graph], Any], inputs: int = 1) -> Captured:
    """The graph that ``build`` makes, with no model behind it."""
    graph = Graph()
    output = build(graph)
    graph.output(output if isinstance(output, tuple) else (output,))
    names = {node.name: node.name.partition("_")[0] for node in graph.nodes}
    leaves = tuple(torch.zeros(1) for _ in range(inputs))
    return Captured(
        GraphModule(tensors, graph), names, InputSpec.unconstrained(leaves), flatten_tree((torch.zeros(1),), [])
    )


def calls(graph: Graph, target: Any, *args: Any) -> Any:
    """A call of an operator's default overload, or of the overload itself, under the operator's name."""
    operation = getattr(target, "default", target)
    return graph.create_node("call_function", operation, args, name=operation.__name__.partition(".")[0])


def made(graph: Graph, *of: str) -> Any:
    """The product of inputs: what is no cheap thing to do again."""
    x, *rest = (graph.placeholder(name) for name in of or ("x",))
    return calls(graph, aten.mm, x, rest[0] if rest else x)


def item(graph: Graph, of: Any, index: int) -> Any:
    return graph.call_function(operator.getitem, (of, index))


def units_of(module: nn.Module, inputs: Any) -> Units:
    return group(capture(module.double(), inputs))


def together(units: Units) -> list[set[str]]:
    """The names in each unit that has several nodes."""
    return [{node.name for node in nodes} for nodes in units.groups if len(nodes) > 1]


@functools.cache
def from_zoo(name: str) -> tuple[Job, nn.Module, Units]:
    """A model of the zoo, captured."""
    torch.manual_seed(1)
    job = ZOO[name]()
    model = job.model()
    return job, model, group(capture(model, job.inputs))


class Branches(nn.Module):
    """A trunk, four branches, two of them of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(1, 4, 3, padding=1)
        self.b1 = nn.Conv2d(4, 3, 1)
        self.b2 = nn.Sequential(nn.Conv2d(4, 3, 1), nn.Tanh(), nn.Conv2d(3, 4, 3, padding=1))
        self.b3 = nn.Sequential(nn.Conv2d(4, 2, 1), nn.Tanh(), nn.Conv2d(2, 3, 5, padding=2))
        self.b4 = nn.Conv2d(4, 2, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.trunk(x))
        joined = torch.cat([self.b1(x), self.b2(x), self.b3(x), self.b4(x)], 1)
        return self.head(joined.mean((2, 3)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """As nanoGPT has it: ``contiguous`` does nothing after attention, so it is not in the graph, and ``view`` needs it.

    Before that, images that a convolution leaves with their channels last, which are rows without a copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 2, stride=2)
        self.mix = nn.Conv2d(8, 8, 1)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.stem(x).contiguous(memory_format=torch.channels_last))
        samples, width = x.shape[:2]
        x = x.permute(0, 2, 3, 1).view(samples, -1, width)
        length = x.shape[1]
        q, k, v = (each.view(samples, length, 2, -1).transpose(1, 2) for each in self.qkv(x).split(width, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(samples, length, width))
        return self.head(x).transpose(1, 2)
