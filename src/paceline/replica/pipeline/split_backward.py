"""Gradients of inputs and of weights, computed apart at no extra cost, by replacing operators of a part.

Gradients of inputs and of weights, computed apart at no extra cost.

::

    autograd        | dx and dW of layer 3 | dx and dW of layer 2 | dx and dW of layer 1 |
    split           | dx 3 | dx 2 | dx 1 |   ...   | dW 3 | dW 2 | dW 1 |
                      backward_input                 backward_weight

That is so for products and convolutions with a parameter, where nearly all of the work lies. Each is a function whose
backward computes dx and puts dW off. Other parameters (of norms, embeddings) get their gradients with dx.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from paceline.replica.activation_memory import Tally

Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class OpReplacements:
    """What is called instead, with the same arguments.

    Args:
        operators: for targets of nodes.
        functions: for functions of ``torch.nn.functional``, by name.
        users: kinds of modules that call such functions -> the method in which they do.
    """

    operators: Mapping[Any, Function]
    functions: Mapping[str, Function]
    users: Mapping[type[nn.Module], str]


def substitute(module: nn.Module, substitutes: OpReplacements) -> bool:
    """Put functions in the place of others; returns whether there were any. The module is changed in place."""
    found = False
    for each in module.modules():
        if isinstance(each, GraphModule):
            found |= _retarget(each, substitutes.operators)
        for kind, method in substitutes.users.items():
            if isinstance(each, kind):
                other = rebound(getattr(type(each), method), F=_namespace(substitutes.functions))
                setattr(each, method, MethodType(other, each))
                found = True
    return found


def rebound(function: Any, **names: Any) -> Any:
    """A function of the same code, for which some global names stand for something else.

    >>> def area(r): return PI * r * r
    >>> rebound(area, PI=3)(2)
    12
    """
    known = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _namespace(functions: Mapping[str, Function]) -> SimpleNamespace:
    """``torch.nn.functional`` but for some functions."""
    return SimpleNamespace(**{**vars(functional), **functions})


def _retarget(graph: GraphModule, operators: Mapping[Any, Function]) -> bool:
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and node.target in operators]
    for node in nodes:
        node.target = operators[node.target]
    if nodes:
        graph.recompile()
    return bool(nodes)


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

_USERS: dict[type[nn.Module], str] = {
    nn.Linear: "forward",
    nn.Conv1d: "_conv_forward",
    nn.Conv2d: "_conv_forward",
    nn.Conv3d: "_conv_forward",
    nn.MultiheadAttention: "forward",
}


class DeferredWeightGrads:
    """Gradients of weights that have been put off, and what they will be made of."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def put_off(self, add: Callable[..., None], *arguments: Any) -> None:
        """Have ``add(*arguments)`` called later; it adds to the ``grad`` of parameters."""
        self._waiting.append((add, arguments))

    def run(self) -> None:
        """Compute them, and let go of what they were made of."""
        if not self._waiting:
            return
        with torch.no_grad():
            while self._waiting:
                add, arguments = self._waiting.popleft()
                add(*arguments)

    def tally(self, tally: Tally) -> None:
        """Count what is kept for them."""
        for _, arguments in self._waiting:
            tally.add_all(arguments)


class Splitter:
    """The functions that split, for one part.

    Args:
        device: as torch writes it.
    """

    def __init__(self, device: str) -> None:
        self._kind = torch.device(device).type
        self._later: DeferredWeightGrads | None = None
        self._precision: torch.dtype | None = None
        convolutions = {
            name: self._convolution(getattr(torch, name), dims) for dims, name in enumerate(_CONVOLUTIONS, 1)
        }
        operators: dict[str, Function] = {"linear": self._linear, "addmm": self._addmm, **convolutions}
        attention = {"multi_head_attention_forward": _attention(self._linear)}
        functions: dict[str, Function] = {"linear": self._linear, **convolutions, **attention}
        aten = torch.ops.aten
        self.substitutes = OpReplacements(
            {getattr(aten, name).default: f for name, f in operators.items()}, functions, _USERS
        )

    @contextmanager
    def putting_off(self, later: DeferredWeightGrads | None) -> Iterator[None]:
        """While it is entered, forward passes put their weights off; with None they split nothing."""
        before = self._later, self._precision
        autocast = torch.is_autocast_enabled(self._kind)
        self._later, self._precision = later, torch.get_autocast_dtype(self._kind) if autocast else None
        try:
            yield
        finally:
            self._later, self._precision = before

    def as_now(self) -> AbstractContextManager[None]:
        """While that is entered, weights are put off to where they are now."""
        return self.putting_off(self._later)

    def _splits(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Only a leaf has a ``grad`` to add to."""
        leaves = weight.is_leaf and (bias is None or bias.is_leaf)
        return self._later is not None and leaves and weight.requires_grad and torch.is_grad_enabled()

    def _cast(self, input: Tensor) -> Tensor:
        """As autocast has it, which leaves float64 alone; so what is kept is what the product was made of."""
        if self._precision is None or input.dtype == torch.float64:
            return input
        return input.to(self._precision)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._splits(weight, bias):
            return functional.linear(input, weight, bias)
        return _Product.apply(self._cast(input), weight, bias, self._later, False)  # type: ignore[no-any-return, no-untyped-call]

    def _addmm(self, bias: Tensor, input: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if beta != 1 or alpha != 1 or bias.dim() != 1 or not self._splits(weight, bias):
            return torch.addmm(bias, input, weight, beta=beta, alpha=alpha)
        return _Product.apply(self._cast(input), weight, bias, self._later, True)  # type: ignore[no-any-return, no-untyped-call]

    def _convolution(self, plain: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
        def convolve(
            input: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            dilation: Any = 1,
            groups: int = 1,
        ) -> Tensor:
            if isinstance(padding, str):
                return plain(input, weight, bias, stride, padding, dilation, groups)
            how = (_each(stride, dims), _each(padding, dims), _each(dilation, dims), groups)
            if input.dim() != dims + 2 or not self._splits(weight, bias):
                return plain(input, weight, bias, *how)
            return _Convolution.apply(self._cast(input), weight, bias, self._later, how)  # type: ignore[no-any-return, no-untyped-call]

        return convolve


def _attention(linear: Function) -> Function:
    """That of nn.MultiheadAttention, with another ``linear``."""
    projections = {name: rebound(getattr(functional, name), linear=linear) for name in _PROJECTIONS}
    return rebound(functional.multi_head_attention_forward, linear=linear, **projections)  # type: ignore[no-any-return]


_PROJECTIONS = ("_in_projection", "_in_projection_packed")


class _Product(torch.autograd.Function):
    """x·Wᵀ + b, or x·W + b where ``upright``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: DeferredWeightGrads, upright: bool
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.later, ctx.upright = weight, bias, later, upright
        return functional.linear(x, weight.t() if upright else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x,), weight = gradients, ctx.saved_tensors, ctx.weight
        ctx.later.put_off(_add_product, weight, ctx.bias, x, gradient, ctx.upright)
        w = weight if weight.dtype == gradient.dtype else weight.to(gradient.dtype)
        dx = gradient @ (w.t() if ctx.upright else w) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None


def _add_product(weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor, upright: bool) -> None:
    x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    left, right = (x.t(), gradient) if upright else (gradient.t(), x)
    if weight.grad is not None and weight.grad.dtype == x.dtype:
        weight.grad.addmm_(left, right)
    else:
        _add(weight, left @ right)
    if bias is not None and bias.requires_grad:
        _add(bias, gradient.sum(0))


class _Convolution(torch.autograd.Function):
    """x * W + b, of any dims."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: DeferredWeightGrads, how: Any
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.later, ctx.how = weight, bias, later, how
        stride, padding, dilation, groups = how
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x,), weight = gradients, ctx.saved_tensors, ctx.weight
        ctx.later.put_off(_add_convolution, weight, ctx.bias, x, gradient, ctx.how)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _convolution_backward(gradient, x, weight.to(x.dtype), ctx.how, (True, False, False))[0]
        return dx, None, None, None, None


def _add_convolution(weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor, how: Any) -> None:
    biased = bias is not None and bias.requires_grad
    _, dw, db = _convolution_backward(gradient, x, weight.to(x.dtype), how, (False, True, biased))
    _add(weight, dw)
    if bias is not None and biased:
        _add(bias, db)


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, how: Any, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation, groups = how
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        gradient, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0] * len(stride), groups, wanted
    )
    return found


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


def _each(value: Any, dims: int) -> list[int]:
    """A number for each dim.

    >>> _each(3, 2), _each((1, 2), 2), _each([4], 2)
    ([3, 3], [1, 2], [4, 4])
    """
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values
