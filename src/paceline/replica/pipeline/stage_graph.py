"""A part's forward and backward as two lists of operators, where passes are short: without Python, without autograd.

::

    traced    forward, and backward from gradients of its outputs, as one graph
    split     what needs no gradient          | the rest
    run       arguments -> outputs, kept      | kept, gradients of outputs -> gradients of values and parameters

Where a schedule splits backward (zero-bubble), so is its graph: what gradients of values are computed of, and the rest.

All are the operators that PyTorch itself runs, in its order, so results have the same bits; they are compared with the
part before they are used. A part that can't be traced, or whose graphs do something else, goes on as it is.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.program import Tree, leaves, map_tree
from paceline.replica.capture.verify import check
from paceline.replica.module_utils import add_gradients, preserve_state, tensors_of
from paceline.replica.operator_list import WARM_S, Operators, PlainSteps, as_it_is, operators_of, simplify
from paceline.replica.operator_trace import trace
from paceline.replica.pipeline.cut import Part
from paceline.replica.pipeline.micro_batches import MicroBatch
from paceline.replica.pipeline.p2p_queue import Received
from paceline.replica.pipeline.portals import InputPortals
from paceline.replica.pipeline.split_graph import split_forward, split_weights
from paceline.replica.step_graph import MOST, form_of
from paceline.schedule.base import SHORT_PASS_S

# (results of the last part, target) -> what it sends, and the loss.
WithLoss: TypeAlias = Callable[[list[Any], Tree], tuple[list[Any], Tensor]]

# Bytes of a part's parameters up to which a split backward may be a graph: it adds gradients as autograd does, by a
# product and a sum, where one call makes both otherwise. On an AMD EPYC a weight of 4 MiB and 64 samples took 1.7 ms
# instead of 1.3 (torch 2.13, one thread, medians of 200).
MOST_SPLIT_BYTES = 4 << 20


class PartGraph(NamedTuple):
    """Forward and backward of a part, for arguments of one form.

    Args:
        forward: (tensors of the part, arguments, ``constants``) -> outputs, and what backward needs besides ``given``.
        backward: (``given``, what forward has kept, gradients of the differentiable outputs) -> gradients of ``values``
            and ``names``.
        constants: tensors that forward has made from numbers.
        given: which of the tensors and arguments backward needs.
        differentiable: of each output, whether it has a gradient.
        values: the arguments that have a gradient.
        names: the parameters that have one.
        weights: what backward has left for it -> gradients of ``put_off``; None: there are none.
        put_off: the parameters whose gradients backward does not compute.
    """

    forward: Operators
    backward: Operators
    constants: Sequence[Tensor]
    given: Sequence[int]
    differentiable: Sequence[bool]
    values: Sequence[int]
    names: Sequence[str]
    weights: Operators | None = None
    put_off: Sequence[str] = ()

    def run(self, tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs, and what :meth:`gradients` needs."""
        every, count = [*tensors, *arguments], len(self.differentiable)
        with torch._C._AutoDispatchBelowAutograd():
            results = self.forward(*every, *self.constants)
        return list(results[:count]), [*(every[index] for index in self.given), *results[count:]]

    def gradients(
        self, kept: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the gradients of ``values`` and ``names``, of those of the outputs, and what :meth:`rest` needs."""
        with torch._C._AutoDispatchBelowAutograd():  # traced for dense gradients
            results = list(self.backward(*kept, *(gradient.contiguous() for gradient in outputs)))
        values, parameters = len(self.values), len(self.values) + len(self.names)
        return results[:values], results[values:parameters], results[parameters:]

    def rest(self, left: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of ``put_off``."""
        if self.weights is None:
            return ()
        with torch._C._AutoDispatchBelowAutograd():
            return self.weights(*left)


class ShortPasses:
    """The graphs of a part, for those forms of micro-batches with which its passes are short and many.

    Args:
        part: with its tensors as they train.
        with_loss: (the part's results, the target) -> what it sends, and the loss; None: it is not the last part.
        autocast: makes the context of a forward pass.
    """

    def __init__(
        self, part: Part, with_loss: WithLoss | None, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._part, self._with_loss, self._autocast = part, with_loss, autocast
        self.put_off: Set[str] = frozenset()
        """The parameters whose gradients are put off, where backward is split."""
        self._named = tensors_of(part.module)
        self._graphs: dict[Hashable, PartGraph | None] = {}
        self._made: dict[Hashable, PlainSteps] = defaultdict(PlainSteps)
        """Forward passes without a graph."""

    def of(
        self, micro_batch: MicroBatch, received: Sequence[Received], *, idle: bool
    ) -> tuple[Hashable, PartGraph | None]:
        """Return the form of a forward pass, and the graph for it; None: it is passed as ever.

        The form is all that a graph depends on: shapes, strides and types, and which values are differentiable.

        Args:
            micro_batch: on the worker's device.
            received: values of the part's crossings.
            idle: whether the part has no pass under way: a comparison writes its buffers, which autograd would notice.
        """
        values, target = list(received), micro_batch.target if self._with_loss is not None else ()
        try:
            form = form_of(([micro_batch.inputs[leaf] for leaf in self._part.inputs], values, target))
        except InputError:  # there is something in the target of which nobody knows
            return None, None
        if form in self._graphs or len(self._graphs) == MOST:
            return form, self._graphs.get(form)
        passes, seconds, _ = self._made[form]
        if not (idle and passes) or seconds < WARM_S or seconds / passes > SHORT_PASS_S:
            return form, None
        try:
            self._graphs[form] = self._checked(micro_batch, received)
        except Exception:  # whatever torch raises where it can't trace; the part itself is right in any case
            self._graphs[form] = None
        return form, self._graphs[form]

    def passed(self, form: Hashable, seconds: Seconds) -> None:
        """Note a forward pass without a graph."""
        self._made[form] = self._made[form].with_one(seconds)

    def run(
        self, graph: PartGraph, micro_batch: MicroBatch, received: Sequence[Received]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Make a forward pass; returns what is sent, and the loss in the last part, and what backward needs."""
        return graph.run(list(self._named.values()), self._arguments(micro_batch, received))

    def differentiate(
        self, graph: PartGraph, kept: Sequence[Tensor], upstream: Sequence[Tensor], portals: InputPortals
    ) -> list[Tensor]:
        """Make the backward pass: send the gradients of values, and add those of parameters to their ``grad``.

        Args:
            graph: of the forward pass.
            kept: by it.
            upstream: gradients of its differentiable outputs.
            portals: of its values.

        Returns:
            What :meth:`differentiate_weights` needs.
        """
        values, parameters, left = graph.gradients(kept, upstream)
        for index, gradient in zip(graph.values, values, strict=True):
            portals.send(self._part.received[index - len(self._part.inputs)].name, gradient)
        add_gradients([self._named[name] for name in graph.names], parameters)
        return left

    def differentiate_weights(self, graph: PartGraph, left: Sequence[Tensor]) -> None:
        """Add the gradients that were put off to their parameters' ``grad``, of what :meth:`differentiate` has left."""
        add_gradients([self._named[name] for name in graph.put_off], graph.rest(left))

    def _arguments(self, micro_batch: MicroBatch, received: Sequence[Received]) -> list[Any]:
        inputs = [micro_batch.inputs[leaf] for leaf in self._part.inputs]
        target = leaves(micro_batch.target) if self._with_loss is not None else []
        return [*inputs, *(value for value, _ in received), *target]

    def _checked(self, micro_batch: MicroBatch, received: Sequence[Received]) -> PartGraph:
        arguments, offset = self._arguments(micro_batch, received), len(self._part.inputs)
        for index, (value, differentiable) in enumerate(received, offset):
            if not isinstance(value, Tensor):
                raise InputError("a number is sent to it")
            if differentiable:
                arguments[index] = value.detach().requires_grad_()
        outputs = _Outputs(self._part, self._with_loss, micro_batch.target, self._autocast)
        return checked_graph(outputs, arguments, put_off=self.put_off)


class _Outputs(nn.Module):
    """(inputs, values that are received, leaves of the target) -> what a part sends, and in the last one the loss.

    It has the part's own tensors, under the same names.
    """

    compute: Callable[..., Sequence[Any]]
    """The part's forward."""

    def __init__(
        self, part: Part, with_loss: WithLoss | None, target: Tree, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = (
            part.module._modules, part.module._parameters, part.module._buffers,
        )  # fmt: skip
        vars(self)["compute"] = part.module.forward
        self._with_loss, self._target, self._autocast = with_loss, target, autocast

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Return them."""
        with self._autocast():
            if self._with_loss is None:
                return tuple(self.compute(*tensors))
            count = len(leaves(self._target))
            given, remaining = tensors[: len(tensors) - count], iter(tensors[len(tensors) - count :])
            target = map_tree(lambda _: next(remaining), self._target)
            sent, loss = self._with_loss(list(self.compute(*given)), target)
            return *sent, loss


def checked_graph(module: nn.Module, arguments: Sequence[Tensor], *, put_off: Set[str] = frozenset()) -> PartGraph:
    """Return the graph of a part, compared with the part itself on these arguments; all is left as it is.

    Args:
        module: returns a tuple of tensors.
        arguments: of it; those that have a gradient in training require one.
        put_off: parameters whose gradients backward does not compute.

    Raises:
        InputError: the graph does something else, or can't be made.
        Exception: torch can't trace the part.
    """
    with preserve_state(module):
        graph = _traced(module, arguments, put_off)

        def run(inputs: Any) -> Any:
            own = tensors_of(module)
            names = *graph.names, *graph.put_off
            sources = [*(inputs[index] for index in graph.values), *(own[name] for name in names)]
            return _Differentiated.apply(graph, list(own.values()), list(inputs), *sources)  # type: ignore[no-untyped-call]

        inputs = tuple(argument.detach() for argument in arguments)
        with as_it_is():
            check(module, run, lambda: tensors_of(module), inputs, samples=(), of_inputs=graph.values)
    return graph


def _traced(module: nn.Module, arguments: Sequence[Tensor], put_off: Set[str]) -> PartGraph:
    """Trace forward and backward in one, and split them."""
    named = tensors_of(module)
    sources: dict[Any, None] = {}
    differentiable: list[bool] = []
    with torch.no_grad():
        like = [torch.ones_like(output, memory_format=torch.contiguous_format) for output in module(*arguments)]

    def joint(tensors: list[Tensor], given: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
        own = dict(zip(named, tensors, strict=True))
        outputs: Sequence[Tensor] = torch.func.functional_call(module, own, tuple(given))
        differentiable[:] = [output.requires_grad for output in outputs]
        roots = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        each: dict[Any, Tensor] = {index: leaf for index, leaf in enumerate(given) if leaf.requires_grad}
        each |= {name: leaf for name, leaf in own.items() if leaf.requires_grad}
        ends, upstream = zip(*roots, strict=True)
        found = torch.autograd.grad(ends, list(each.values()), upstream, allow_unused=True)
        computed = {source: gradient for source, gradient in zip(each, found, strict=True) if gradient is not None}
        sources.update(dict.fromkeys(computed))
        # Autograd, too, gives a parameter's gradient the parameter's strides.
        gradients = [g.contiguous() if isinstance(source, str) else g for source, g in computed.items()]
        return (*(output.detach() for output in outputs), *gradients)

    traced = trace(joint, list(named.values()), arguments, like)
    simplify(traced)
    forward, backward, given = split_forward(traced, len(like), differentiable)
    run, constants = operators_of(forward)
    values = [source for source in sources if isinstance(source, int)]
    names = [source for source in sources if isinstance(source, str)]
    early, late = ([name for name in names if (name in put_off) == put] for put in (False, True))
    weights: Operators | None = None
    if late:
        numbers = {len(values) + names.index(name) for name in late}
        backward, of_weights = split_weights(backward, len(values), numbers)
        weights, _ = operators_of(of_weights)
    back, _ = operators_of(backward)
    return PartGraph(run, back, constants, given, tuple(differentiable), values, early, weights, late)


class _Differentiated(torch.autograd.Function):
    """(graph, tensors of the part, arguments, those that have a gradient) -> outputs, for a comparison."""

    @staticmethod
    def forward(
        ctx: Any, graph: PartGraph, tensors: Sequence[Tensor], arguments: Sequence[Tensor], *sources: Tensor
    ) -> tuple[Tensor, ...]:
        del sources
        with torch.enable_grad():  # as in training
            outputs, ctx.kept = graph.run(tensors, arguments)
        ctx.graph = graph
        pairs = list(zip(outputs, graph.differentiable, strict=True))
        ctx.mark_non_differentiable(*(output for output, needed in pairs if not needed))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        pairs = zip(gradients, ctx.graph.differentiable, strict=True)
        values, parameters, left = ctx.graph.gradients(ctx.kept, [gradient for gradient, needed in pairs if needed])
        return None, None, None, *values, *parameters, *ctx.graph.rest(left)
