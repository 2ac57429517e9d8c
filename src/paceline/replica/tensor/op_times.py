"""Work of an operator, and the time it takes forward and backward, measured on the first batch."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.replica.module_utils import preserve_tensors
from paceline.replica.tensor.base import OpCall, aten

# Operators -> the time of each, in any unit.
OpTimes: TypeAlias = Callable[[Sequence[OpCall]], Mapping[Node, float]]

# Repeats, of which the fastest counts: whatever else the machine does only makes an operator slower.
REPEATS = 3

_PRODUCTS = (aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default, aten.bmm.default)


def op_work(call: OpCall) -> float:
    """Count an operator's multiplications forward, or its elements; backward is in proportion."""
    elements = sum(prod(value.shape) for value in call.outputs)
    if call.target in _PRODUCTS:
        index = 1 if call.target is aten.addmm.default else 0
        return float(elements * call.inputs[index].shape[-1])
    if "conv" in str(call.target) and len(call.inputs) > 1:
        return float(elements * prod(call.inputs[1].shape[1:]))
    return float(elements)


def multiplication_counts(calls: Sequence[OpCall]) -> Mapping[Node, float]:
    """Return each operator's work, where times are not measured."""
    return {call.node: op_work(call) for call in calls}


def measure_op_times(module: GraphModule, leaves: Sequence[Any], calls: Sequence[OpCall]) -> Mapping[Node, float]:
    """Measure the seconds of operators; the model and the input are left as they were.

    Args:
        module: a captured graph.
        leaves: leaves of the input.
        calls: the operators.
    """
    by_node = {call.node: call for call in calls}
    fastest = dict.fromkeys(by_node, float("inf"))
    tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    with preserve_tensors(module, tensors), torch.no_grad():
        for _ in range(REPEATS):
            timer = _TimingInterpreter(module, by_node)
            timer.run(*leaves)
            fastest = {node: min(seconds, timer.seconds[node]) for node, seconds in fastest.items()}
    return fastest


@final
class _TimingInterpreter(Interpreter):
    """Runs a graph; each operator that is timed runs forward and backward on tensors of its own."""

    def __init__(self, module: GraphModule, calls: Mapping[Node, OpCall]) -> None:
        super().__init__(module)
        self._calls = calls
        self.seconds: dict[Node, float] = {}

    def run_node(self, n: Node) -> Any:
        call = self._calls.get(n)
        if call is None:
            return super().run_node(n)
        learns = any(value.differentiable for value in call.outputs) and not call.mutates
        leaves = dict[Node, Any]()
        for value in call.inputs:
            if learns and value.differentiable:  # a leaf of its own: backward stops at it, and is this operator's alone
                leaves[value.node] = tree_map_only(Tensor, Tensor.detach, self.env[value.node])
                for leaf in tree_leaves(leaves[value.node]):
                    if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                        leaf.requires_grad_()
        args, kwargs = map_arg((n.args, n.kwargs), lambda node: leaves.get(node, self.env[node]))
        began = time.perf_counter()
        with torch.set_grad_enabled(learns):
            result = getattr(self, n.op)(n.target, args, kwargs)
        if learns:  # backward with a gradient of ones, as if the next operator handed it over
            ends = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        self.seconds[n] = time.perf_counter() - began
        return tree_map_only(Tensor, Tensor.detach, result)
