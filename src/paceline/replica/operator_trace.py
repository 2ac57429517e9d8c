"""Record the operators that a function of tensors calls, as a graph: while it runs, once.

::

    function    forward, loss, torch.autograd.grad: Python, modules, autograd
    PyTorch     below autograd | t | addmm | relu | ... | mm | mm |    each call becomes a node

What make_fx does without computing anything, for which it imports a compiler: a second, and 70 MB of each process. To
run a step costs less. What a run alone would not show is refused: a shape or a branch that depends on values, and
a tensor that is read by other code than PyTorch's.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.core.errors import InputError

_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX, _MASKS = torch.ops.aten.index.Tensor, {torch.bool, torch.uint8}
_LIFT, _COPY = torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default

# Ways out of PyTorch, of which no operator tells.
_READS = {Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.__array__, Tensor.__dlpack__}

# Stands in a node's meta["val"] for a tensor, as the graph's passes look for what is none.
_TENSOR = torch.empty(0)


def trace(function: Callable[..., Sequence[Tensor]], *groups: Sequence[Tensor]) -> GraphModule:
    """Return the graph of a function, which is run; what it writes into tensors that were there before is undone.

    Args:
        function: of lists of tensors, to a sequence of tensors.
        groups: those lists; the graph's inputs are all of them in a row. The function is given other tensors with the
            same memory, so that each is an input of its own.

    Raises:
        InputError: the graph would not hold for other values.
    """
    own = [[tensor.detach().requires_grad_(tensor.requires_grad) for tensor in group] for group in groups]
    recorder = _Recorder([tensor for group in own for tensor in group])
    try:
        with _Reads(recorder), recorder:
            outputs = function(*own)
        if recorder.refused is not None:
            raise recorder.refused
        recorder.graph.output(tuple(recorder.node_of(output) for output in outputs))
    finally:
        recorder.restore()
    return GraphModule(recorder.constants, recorder.graph)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds a node for each call of an operator, and calls it."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.constants = Graph(), nn.Module()
        self.refused: InputError | None = None
        """Why there is no graph; the function may have caught it."""
        self._nodes: Any = WeakTensorKeyDictionary()  # what nobody else needs is freed
        self._given = defaultdict[int, list[Tensor]](list)
        """Inputs and constants whose memory was not written, by that."""
        self._written = list[tuple[Tensor, Tensor]]()
        """The others, and what they were before."""
        for number, tensor in enumerate(inputs):
            self._give(tensor, self.graph.placeholder(f"input_{number}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and to tell the compiler so torch imports it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise self.refusal(f"it calls {func}, which is no operator of PyTorch's")
        by_numbers = func is _INDEX and all(index is None or index.dtype not in _MASKS for index in args[1])
        if not (by_numbers or _BY_VALUE.isdisjoint(func.tags)):
            raise self.refusal(f"it asks for the values of a tensor ({func}), which a graph does not")
        if func is _LIFT:  # a tensor made of numbers is made anew by each run, and may be written
            func = _COPY
        node = self.graph.call_function(func, *map_aggregate((tuple(args), kwargs), self._argument))
        self._keep_written(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._note(result, node)
        elif isinstance(result, (list, tuple)):
            node.meta["val"] = [_TENSOR if isinstance(each, Tensor) else each for each in result]
            for number, each in enumerate(result):
                if isinstance(each, Tensor):
                    self._note(each, self.graph.call_function(operator.getitem, (node, number)))
        return result

    def refusal(self, reason: str) -> InputError:
        """Return an error, which is kept."""
        self.refused = InputError(reason)
        return self.refused

    def node_of(self, tensor: Tensor) -> Node:
        """Return the node of a tensor; one that was there before the run is a constant of the graph."""
        if tensor not in self._nodes:
            name = f"constant_{len(self.graph.find_nodes(op='get_attr'))}"
            setattr(self.constants, name, tensor)
            self._give(tensor, self.graph.get_attr(name))
        found: Node = self._nodes[tensor]
        return found

    def restore(self) -> None:
        """Undo what was written into inputs and constants."""
        with torch.no_grad():
            for tensor, before in self._written:
                tensor.copy_(before)

    def _argument(self, given: Any) -> Any:
        return self.node_of(given) if isinstance(given, Tensor) else given

    def _give(self, tensor: Tensor, node: Node) -> None:
        self._given[tensor.untyped_storage().data_ptr()].append(tensor)
        self._note(tensor, node)

    def _note(self, tensor: Tensor, node: Node) -> None:
        node.meta["val"], node.meta["shape"] = _TENSOR, tensor.shape
        self._nodes[tensor] = node

    def _keep_written(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Keep what inputs and constants are that a call writes."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(tensor, Tensor):
                    memory = tensor.untyped_storage().data_ptr()
                    self._written += [(each, each.detach().clone()) for each in self._given.pop(memory, ())]


class _Reads(TorchFunctionMode):
    """Refuses what reads a tensor's memory without an operator."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func in _READS:
            raise self._recorder.refusal(
                f"it asks for the values of a tensor ({func.__name__}), which a graph does not"
            )
        return func(*args, **(kwargs or {}))
