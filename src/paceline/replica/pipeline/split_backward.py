"""Split backward (zero-bubble pipelines): gradients of weights are deferred, at no extra cost.

::

    autograd        | dx and dW of layer 3 | dx and dW of layer 2 | dx and dW of layer 1 |
    split           | dx 3 | dx 2 | dx 1 |   ...   | dW 3 | dW 2 | dW 1 |
                      backward_input                 backward_weight

Products and convolutions with a parameter, which are nearly all of the work, are replaced by functions whose backward
computes dx and defers dW. Other parameters (of norms, embeddings) get their gradients with dx.

Nodes of a captured graph get another target. Modules that are called whole (children of an nn.Sequential) keep theirs;
but those inside whose forward is known to call such functions, as nn.Linear calls ``F.linear``, get a forward of the
same code in which ``F`` stands for other functions.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from paceline.replica.module_utils import per_dim

Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class OpReplacements:
    """Functions to call instead of others, with the same arguments.

    Args:
        operators: target of a node -> function.
        functions: name in ``torch.nn.functional`` -> function.
        methods: module class that calls such functions -> the method in which it does.
    """

    operators: Mapping[Any, Function]
    functions: Mapping[str, Function]
    methods: Mapping[type[nn.Module], str]


def replace_ops(modules: Iterable[nn.Module], replacements: OpReplacements) -> bool:
    """Replace functions that modules call, in place; returns whether there were any."""
    replaced = False
    functional_with = SimpleNamespace(**{**vars(functional), **replacements.functions})
    for module in (each for root in modules for each in root.modules()):
        if isinstance(module, GraphModule):
            nodes = [n for n in module.graph.nodes if n.op == "call_function" and n.target in replacements.operators]
            for node in nodes:
                node.target = replacements.operators[node.target]
            if nodes:
                module.recompile()
                replaced = True
        for kind, method in replacements.methods.items():
            if isinstance(module, kind):
                other = rebound(getattr(type(module), method), F=functional_with)
                setattr(module, method, MethodType(other, module))
                replaced = True
    return replaced


def rebound(function: Any, **names: Any) -> Any:
    """Return a function of the same code, in which some global names stand for something else.

    >>> def area(r): return PI * r * r
    >>> rebound(area, PI=3)(2)
    12
    """
    names = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

_METHODS: dict[type[nn.Module], str] = {
    nn.Linear: "forward",
    nn.Conv1d: "_conv_forward",
    nn.Conv2d: "_conv_forward",
    nn.Conv3d: "_conv_forward",
    nn.MultiheadAttention: "forward",
}


@dataclass
class DeferredWeightGrads:
    """The gradients of weights that one backward pass has deferred.

    Args:
        calls: functions that add to the ``grad`` of parameters, each with its arguments.
    """

    calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=deque)

    def run(self) -> None:
        """Compute them, releasing one by one what they are computed of."""
        if self.calls:
            with torch.no_grad():
                while self.calls:
                    add, arguments = self.calls.popleft()
                    add(*arguments)


class Splitter:
    """The functions that split backward, for one part.

    Args:
        device: as torch writes it.
        fused: whether a product is added to a gradient in one call, which rounds once where autograd rounds twice.
    """

    def __init__(self, device: str, *, fused: bool = True) -> None:
        self._device_type, self.fused = torch.device(device).type, fused
        self.target: DeferredWeightGrads | None = None
        self._precision: torch.dtype | None = None
        convolutions = {
            name: self._convolution(getattr(torch, name), dims) for dims, name in enumerate(_CONVOLUTIONS, 1)
        }
        operators: dict[str, Function] = {"linear": self._linear, "addmm": self._addmm, **convolutions}
        # nn.MultiheadAttention's function calls linear by way of two others of its module.
        projections = {
            name: rebound(getattr(functional, name), linear=self._linear)
            for name in ("_in_projection", "_in_projection_packed")
        }
        attention = rebound(functional.multi_head_attention_forward, linear=self._linear, **projections)
        self.replacements = OpReplacements(
            {getattr(torch.ops.aten, name).default: function for name, function in operators.items()},
            {"linear": self._linear, **convolutions, "multi_head_attention_forward": attention},
            _METHODS,
        )

    @contextmanager
    def deferring_to(self, target: DeferredWeightGrads | None) -> Iterator[None]:
        """Context manager: forward passes defer gradients of weights to ``target``; with None they split nothing."""
        before = self.target, self._precision
        autocast = torch.is_autocast_enabled(self._device_type)
        self.target, self._precision = target, torch.get_autocast_dtype(self._device_type) if autocast else None
        try:
            yield
        finally:
            self.target, self._precision = before

    def _splits(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Return True if a weight's gradient can be deferred: only a leaf has a ``grad`` to add to.

        That of a complex weight is not: it is of conjugates.
        """
        leaves = weight.is_leaf and (bias is None or bias.is_leaf) and not weight.is_complex()
        return self.target is not None and leaves and weight.requires_grad and torch.is_grad_enabled()

    def _cast(self, input: Tensor) -> Tensor:
        """Cast as autocast does, which leaves float64 alone; so the tensor that is kept is the product's own input."""
        if self._precision is None or input.dtype == torch.float64:
            return input
        return input.to(self._precision)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._splits(weight, bias):
            return functional.linear(input, weight, bias)
        return _Product.apply(self._cast(input), weight, bias, self.target, False, self.fused)  # type: ignore[no-any-return, no-untyped-call]

    def _addmm(self, bias: Tensor, input: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if beta != 1 or alpha != 1 or bias.dim() != 1 or not self._splits(weight, bias):
            return torch.addmm(bias, input, weight, beta=beta, alpha=alpha)
        return _Product.apply(self._cast(input), weight, bias, self.target, True, self.fused)  # type: ignore[no-any-return, no-untyped-call]

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
            options = (per_dim(stride, dims), per_dim(padding, dims), per_dim(dilation, dims), groups)
            # Without a batch dim, convolution_backward would need another form.
            if input.dim() != dims + 2 or not self._splits(weight, bias):
                return plain(input, weight, bias, *options)
            return _Convolution.apply(self._cast(input), weight, bias, self.target, options)  # type: ignore[no-any-return, no-untyped-call]

        return convolve


class _Product(torch.autograd.Function):
    """x·Wᵀ + b, or x·W + b where ``upright``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: DeferredWeightGrads,
        upright: bool,
        fused: bool,
    ) -> Tensor:
        ctx.save_for_backward(x)
        # The parameter itself, since the deferred call adds to its ``grad``.
        ctx.weight, ctx.bias, ctx.target, ctx.upright, ctx.fused = weight, bias, target, upright, fused
        return functional.linear(x, weight.t() if upright else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x,), weight = gradients, ctx.saved_tensors, ctx.weight
        ctx.target.calls.append((_add_product, (weight, ctx.bias, x, gradient, ctx.upright, ctx.fused)))
        w = weight if weight.dtype == gradient.dtype else weight.to(gradient.dtype)
        dx = gradient @ (w.t() if ctx.upright else w) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


def _add_product(weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor, upright: bool, fused: bool) -> None:
    x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    left, right = (x.t(), gradient) if upright else (gradient.t(), x)
    if fused and weight.grad is not None and weight.grad.dtype == x.dtype:
        weight.grad.addmm_(left, right)  # product and sum in one call, without a temporary of the weight's size
    else:
        _accumulate(weight, left @ right)
    if bias is not None and bias.requires_grad:
        _accumulate(bias, gradient.sum(0))


class _Convolution(torch.autograd.Function):
    """x * W + b, of any dims; ``options`` are stride, padding, dilation and groups."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: DeferredWeightGrads, options: Any
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.target, ctx.options = weight, bias, target, options
        stride, padding, dilation, groups = options
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x,), weight = gradients, ctx.saved_tensors, ctx.weight
        ctx.target.calls.append((_add_convolution, (weight, ctx.bias, x, gradient, ctx.options)))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _convolution_backward(gradient, x, weight.to(x.dtype), ctx.options, (True, False, False))[0]
        return dx, None, None, None, None


def _add_convolution(weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor, options: Any) -> None:
    biased = bias is not None and bias.requires_grad
    _, dw, db = _convolution_backward(gradient, x, weight.to(x.dtype), options, (False, True, biased))
    _accumulate(weight, dw)
    if bias is not None and biased:
        _accumulate(bias, db)


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, options: Any, outputs: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation, groups = options
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        gradient, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0] * len(stride), groups, outputs
    )
    return result


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)
