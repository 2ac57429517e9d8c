"""Verify that a captured, cut or rewritten model equals the eager one: forward, backward and buffers, by name.

Whether a captured, cut or rewritten model is the model: forward, backward and buffers, by name.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from paceline.comm.shared_memory import SpillAllocator
from paceline.core.errors import InputError
from paceline.program import Tree, call, map_tree
from paceline.replica.capture.export import WAYS_OUT
from paceline.replica.capture.input_spec import batch_size, named_leaves, resized, taken_apart
from paceline.replica.module_utils import preserve_state, preserve_tensors, tensors_of


def gradients_apart(expected: Tensor | None, found: Tensor | None, ulps: float, scale: float) -> str:
    """The same of gradients, of which each may be missing: then it is 0. A found one that is 0 has no scale."""
    if expected is None or found is None:
        there = expected if found is None else found
        if there is None or not there.count_nonzero():
            return ""
        return f"is {'missing' if found is None else 'there'}, where the model has {'one' if found is None else 'none'}"
    return apart(expected, found, ulps, scale if found.count_nonzero() else 0.0)


def apart(expected: Tensor, found: Tensor, ulps: float, scale: float) -> str:
    """In words, how far two tensors are apart; empty where it is within ``ulps`` units of the last place.

    Args:
        expected: by its largest element that place is measured.
        found: the other.
        ulps: how many.
        scale: an element that there might have been, where it is larger.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"is {tuple(found.shape)} of {found.dtype} instead of {tuple(expected.shape)} of {expected.dtype}"
    if torch.equal(expected, found):
        return ""
    if not (expected.is_floating_point() or expected.is_complex()):
        return f"differs in {int((expected != found).sum())} of its {expected.numel()} elements"
    allowed = ulps * torch.finfo(expected.dtype).eps * max(largest(expected), scale)
    if torch.isclose(expected, found, rtol=0.0, atol=allowed, equal_nan=True).all():
        return ""
    gap = float((expected - found).abs().max())
    return f"differs by up to {gap:.3g}, its largest element being {largest(expected):.3g}"


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


Run = Callable[[Tree], Tree]
Named = Callable[[], Mapping[str, Tensor]]


def check(
    module: nn.Module,
    run: Run,
    named: Named,
    inputs: Tree,
    *,
    what: str = "graph",
    samples: Sequence[int] = (2, 3),
    ulps: float = 32,
    of_inputs: bool | Collection[int] = True,
    training: bool = True,
) -> None:
    """Run a model and what was made of it on the same few samples, and compare what comes out by name.

    With y the differentiable leaves of the output and r seeded normal numbers, compared are all leaves,

        d(Σ r·y)/dθ  for every parameter θ and every floating input,

    and the buffers afterwards. A gradient that torch doesn't give is 0.

    Args:
        module: the model itself, in one mode for as long as this takes; left as it is.
        run: an input -> the output that the model itself would give.
        named: gives the tensors that ``run`` computes with, by the model's names and of full size: asked before each
            run for the parameters, after it for the buffers. A name that it leaves out has no gradient, and a buffer
            that it leaves out is the model's own.
        inputs: a batch as the model is called with it, of any number of samples.
        what: ``run`` is, for the message.
        samples: sizes of the batches that are looked at; those that the model itself can't take are passed over, and
            where it takes none, the batch is looked at as it is.
        ulps: how far two elements may lie apart, in units of the last place of the tensor's largest one. The same
            operators in the same order differ by nothing in any precision. Where a value has k consumers, or a
            parameter k names, their k gradients may be added in another order; each addition then differs by at most
            one unit, and what follows carries it on: 32 leave room for that. What sums in another order, as shards
            do, needs more, and says why. (Gradients below as many units of the largest of all gradients are noise:
            that of a bias before a normalisation, which is 0.)
        of_inputs: whether gradients of the input are looked at as well, or of which of its leaves; shards don't make
            them.
        training: whether that is the mode, rather than evaluation.

    Raises:
        InputError: names the first output, parameter, input or buffer that differs, and says how to go on.
    """
    how = _How(what, ulps, of_inputs)
    # What a run leaves in an attribute stays for the next one: a graph can't know it, and then differs.
    with preserve_state(module, training=training):
        failures = [_compare(module, run, named, resized(inputs, count), how) for count in samples]
        failure = _compare(module, run, named, inputs, how) if all(failures) else None
        if failure is not None:
            mode = "training" if training else "evaluation"
            raise InputError(
                f"{type(module).__name__} itself fails in {mode} on the batch that it is given: "
                f"{type(failure).__name__}: {failure}"
            ) from failure


@dataclass(frozen=True)
class _How:
    """See :func:`check`."""

    what: str
    ulps: float
    of_inputs: bool | Collection[int]

    def looks_at(self, place: int) -> bool:
        """Whether the gradient of a leaf of the input is compared."""
        return self.of_inputs if isinstance(self.of_inputs, bool) else place in self.of_inputs


def _compare(module: nn.Module, run: Run, named: Named, inputs: Tree, how: _How) -> Exception | None:
    """Raises where the two differ; returns what the model itself raises, if it does."""
    itself, what, spill = partial(call, module), how.what, SpillAllocator()
    try:
        expected = _observed(module, itself, lambda: tensors_of(module), inputs, how, lambda _, g: spill.kept(g))
    except Exception as error:
        return error
    name, samples = type(module).__name__, f"{batch_size(inputs)} samples"
    try:
        found = _observed(module, run, named, inputs, how, _Compared(expected.gradients, how.ulps))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"the {what} of {name} fails on {samples}, which the model itself takes: {type(error).__name__}: {error}; "
            f"change that, or {WAYS_OUT}"
        ) from error
    difference = _difference(expected, found, how.ulps)
    if difference:
        raise InputError(
            f"the {what} of {name} does not do what the model does: with {samples} {difference}; "
            f"{_reason(difference, expected.functions)}; change that, or {WAYS_OUT}"
        )
    return None


Seen = TypeVar("Seen")
"""What is left of a gradient once it has been looked at: all of them at once may be more than there is memory for."""


@dataclass(frozen=True)
class _Observed(Generic[Seen]):
    """What one run gave, under the names that a message has for it."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Seen]
    buffers: Mapping[str, Tensor]
    functions: tuple[str, ...]
    """The model's own autograd Functions that its backward goes through."""


class _Compared:
    """Says of each gradient, in words, how far it is apart from the one that is expected."""

    def __init__(self, expected: Mapping[str, Tensor], ulps: float) -> None:
        self._expected, self._ulps = expected, ulps
        self._largest = max(map(largest, expected.values()), default=0.0)

    def __call__(self, name: str, found: Tensor) -> str:
        return gradients_apart(self._expected.get(name), found, self._ulps, self._largest)


def _observed(
    module: nn.Module, run: Run, named: Named, inputs: Tree, how: _How, look: Callable[[str, Tensor], Seen]
) -> _Observed[Seen]:
    tensors = named()
    buffers = [name for name, _ in module.named_buffers()]
    torch.clear_autocast_cache()  # of weights that another run has cast, whose backward is done
    with preserve_tensors(module, {name: tensors[name] for name in buffers if name in tensors}, seed=_SEED):
        wanted = {f"parameter {name!r}": t for name, t in tensors.items() if t.requires_grad}
        places = ((how.looks_at(index), f"input{place}") for index, (place, _) in enumerate(named_leaves(inputs)))
        fed = map_tree(lambda t: _fed(t, *next(places), wanted), inputs)
        found: list[Tensor] = []
        taken_apart(run(fed), found)
        after, own = named(), dict(module.named_buffers())
        return _Observed(
            {f"output {index}": t.detach().clone() for index, t in enumerate(found)},
            _gradients(found, wanted, look),
            {f"buffer {name!r}": after.get(name, own[name]).detach().clone() for name in buffers},
            tuple(_own_functions(found)),
        )


_SEED = 6174
"""Of dropout and of r; any number would do."""


def _fed(tensor: Tensor, differentiable: bool, name: str, wanted: dict[str, Tensor]) -> Tensor:
    """An input, whose gradient may be wanted as well; a clone of it, since a model may write into what it is given."""
    if not (differentiable and tensor.is_floating_point()):
        return tensor.clone()
    wanted[name] = leaf = tensor.detach().clone().requires_grad_()
    return leaf.clone()


def _gradients(
    outputs: list[Tensor], wanted: Mapping[str, Tensor], look: Callable[[str, Tensor], Seen]
) -> dict[str, Seen]:
    """What is seen in each gradient as soon as it is there; then it is let go of."""
    outputs = [t for t in outputs if t.requires_grad]
    if not outputs or not wanted:
        return {}
    found: dict[str, Seen] = {}

    def seen(name: str, leaf: Tensor) -> None:
        if leaf.grad is not None:  # a Function may give none
            found[name], leaf.grad = look(name, leaf.grad.to_dense()), None

    generator = torch.Generator().manual_seed(_SEED)
    projection = [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in outputs]
    with _told_of_gradients(wanted, seen):
        torch.autograd.backward(outputs, projection, inputs=list(wanted.values()))
    return {name: found[name] for name in wanted if name in found}


@contextmanager
def _told_of_gradients(leaves: Mapping[str, Tensor], tell: Callable[[str, Tensor], None]) -> Iterator[None]:
    """While it is entered, ``tell`` is called with each leaf whose gradient is complete; those of before come back."""
    before = {name: leaf.grad for name, leaf in leaves.items()}
    hooks = [leaf.register_post_accumulate_grad_hook(partial(tell, name)) for name, leaf in leaves.items()]  # type: ignore[no-untyped-call]
    try:
        for leaf in leaves.values():
            leaf.grad = None
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, leaf in leaves.items():
            leaf.grad = before[name]


def _difference(expected: _Observed[Tensor], found: _Observed[str], ulps: float) -> str:
    """In words, the first thing that differs; empty where nothing does."""
    if len(expected.outputs) != len(found.outputs):
        return f"there are {len(found.outputs)} output tensors where the model has {len(expected.outputs)}"
    for name, value in expected.outputs.items():
        if text := apart(value, found.outputs[name], ulps, 0.0):
            return f"{name} {text}"
    for name in {**expected.gradients, **found.gradients}:
        missing = "" if name in found.gradients else gradients_apart(expected.gradients[name], None, ulps, 0.0)
        if text := found.gradients.get(name, missing):
            return f"the gradient of {name} {text}"
    for name, value in expected.buffers.items():
        if text := apart(value, found.buffers[name], ulps, 0.0):
            return f"{name} {text}"
    return ""


def _own_functions(outputs: list[Tensor]) -> Iterator[str]:
    """The user's classes derived from torch.autograd.Function whose backward the outputs' gradients go through."""
    waiting: list[Any] = [t.grad_fn for t in outputs]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            kind: type = node._forward_cls  # type: ignore[attr-defined]
            if not kind.__module__.startswith(("torch.", "paceline.")):
                yield _described(kind)
        waiting += [before for before, _ in node.next_functions]


def _described(kind: type) -> str:
    try:
        return f"{kind.__qualname__} ({inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):  # its source isn't in a file
        return kind.__qualname__


def _reason(difference: str, functions: tuple[str, ...]) -> str:
    if functions and "gradient" in difference:
        return (
            f"its forward calls {', '.join(sorted(set(functions)))}, a torch.autograd.Function, of which "
            "torch.export keeps the operators of forward and loses backward"
        )
    if difference.startswith("buffer"):
        return "a graph keeps what forward writes into a buffer (self.b.copy_(...)), not what it assigns (self.b = ...)"
    if "gradient" in difference:
        return "a hook on backward, or a value that forward takes from .data or .item(), is not in a graph as it is"
    return "forward decides by values, or by what it left in an attribute the last time, which a graph does not see"
