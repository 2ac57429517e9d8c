"""How much work an operator is, and how long it takes, forward and backward.

How long operators of a model take, forward and backward, measured on the first batch.
"""

import time
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.replica.module_utils import preserve_tensors
from paceline.replica.tensor.base import OpCall

aten = torch.ops.aten

_PRODUCTS = (aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default, aten.bmm.default)


def op_work(call: OpCall) -> float:
    """Of forward alone; backward is in proportion."""
    elements = sum(prod(value.shape) for value in call.outputs)
    if call.target in _PRODUCTS:
        index = 1 if call.target is aten.addmm.default else 0
        return float(elements * call.inputs[index].shape[-1])
    if "conv" in str(call.target) and len(call.inputs) > 1:
        return float(elements * prod(call.inputs[1].shape[1:]))
    return float(elements)


REPEATS = 3
"""Of which the quickest counts: whatever else the machine does only makes it slower."""


def measure_op_times(module: GraphModule, leaves: Sequence[Any], calls: Sequence[OpCall]) -> Mapping[Node, float]:
    """Seconds of each of some operators. The model and the input are left as they were.

    Args:
        module: a captured graph.
        leaves: of the input.
        calls: of which operators.
    """
    asked = {call.node: call for call in calls}
    found = dict.fromkeys(asked, float("inf"))
    tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    with preserve_tensors(module, tensors), torch.no_grad():
        for _ in range(REPEATS):
            clock = _Clock(module, asked)
            clock.run(*leaves)
            found = {node: min(took, clock.took[node]) for node, took in found.items()}
    return found


@final
class _Clock(Interpreter):
    """Runs a graph, each operator that is asked about on tensors of its own."""

    def __init__(self, module: GraphModule, asked: Mapping[Node, OpCall]) -> None:
        super().__init__(module)
        self._asked = asked
        self.took: dict[Node, float] = {}

    def run_node(self, n: Node) -> Any:
        call = self._asked.get(n)
        if call is None:
            return super().run_node(n)
        learns = any(value.differentiable for value in call.outputs) and not call.mutates
        fresh = {value.node for value in call.inputs if learns and value.differentiable}
        own = {node: tree_map_only(Tensor, _fresh, self.env[node]) for node in fresh}
        args, kwargs = map_arg((n.args, n.kwargs), lambda node: own.get(node, self.env[node]))
        began = time.perf_counter()
        with torch.set_grad_enabled(learns):
            made = getattr(self, n.op)(n.target, args, kwargs)
        if learns:
            ends = [each for each in tree_leaves(made) if isinstance(each, Tensor) and each.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        self.took[n] = time.perf_counter() - began
        return tree_map_only(Tensor, Tensor.detach, made)


def _fresh(tensor: Tensor) -> Tensor:
    """The same numbers, with a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
