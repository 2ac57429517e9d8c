"""Verification that a captured, cut or rewritten model equals the eager one: forward, backward and buffers, by name."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from paceline.comm.shared_memory import SpillAllocator
from paceline.core.errors import InputError
from paceline.program import Tree, call, map_tree
from paceline.replica.capture.difference import difference, gradient_difference, largest
from paceline.replica.capture.export import WAYS_OUT
from paceline.replica.capture.input_spec import batch_size, flatten_tree, named_leaves, resized
from paceline.replica.module_utils import preserve_state, preserve_tensors, tensors_of


class ModelError(InputError):
    """The model itself fails on the batch that it is given; the cause is its own exception."""


class Reasons(NamedTuple):
    """Likely reasons for a difference, by what differs, and what to write instead of the version."""

    output: str
    gradient: str
    buffer: str
    way_out: str


GRAPH = Reasons(
    output="forward decides by values, or by what it left in an attribute the last time, which a graph does not see",
    gradient="a hook on backward, or a value that forward takes from .data or .item(), is not in a graph as it is",
    buffer="a graph keeps what forward writes into a buffer (self.b.copy_(...)), not what it assigns (self.b = ...)",
    way_out=WAYS_OUT,
)


Run: TypeAlias = Callable[[Tree], Tree]
Named: TypeAlias = Callable[[], Mapping[str, Tensor]]


def check(
    module: nn.Module,
    run: Run,
    named: Named,
    inputs: Tree,
    *,
    description: str = "graph",
    samples: Sequence[int] = (2, 3),
    ulps: float = 32,
    of_inputs: bool | Collection[int] = True,
    training: bool = True,
    reasons: Reasons = GRAPH,
    runs: "Sequence[ModelRun] | None" = None,
) -> None:
    """Run a model and its transformed version on the same few samples, and compare the results by name.

    With y the differentiable leaves of the output and r seeded normal numbers, it compares all leaves,

        d(Σ r·y)/dθ  for every parameter θ and every floating or complex input,

    and the buffers afterwards. A gradient that torch doesn't compute is 0.

    Args:
        module: the model itself, in one mode for as long as this takes; left as it is.
        run: the version, as a function from an input to the output that the model would return.
        named: returns the tensors that ``run`` computes with, by the model's names and of full size: called before each
            run for the parameters, after it for the buffers. A name that it leaves out has no gradient, and a buffer
            that it leaves out is the model's own.
        inputs: a batch as the model is called with it, of any number of samples.
        description: the version, in words for the message.
        samples: sizes of the batches that are compared; those that the model itself can't take are skipped, and where
            it takes none, the batch is compared as it is.
        ulps: the largest difference of two elements, in units of the last place of the tensor's largest one. The same
            operators in the same order differ by nothing in any precision. Where a value has k consumers, or a
            parameter k names, their k gradients may be added in another order; each addition then differs by at most
            one unit, which propagates: 32 leave room for that. Versions that sum in another order, as shards do, need
            more, and say why. (Gradients below as many units of the largest of all gradients are noise: that of a bias
            before a normalisation, which is 0. So are what a buffer is written, beside what is written into others of
            its module: a running mean of 0 beside the variance.) Where the model computes something in a lower
            precision than its own, a norm in float32 in a float64 model say, a difference in the last place there
            becomes one of that precision: then units are its.
        of_inputs: whether gradients of the input are compared as well, or of which of its leaves; shards don't compute
            them.
        training: whether the mode is training, rather than evaluation.
        reasons: those of this kind of version.
        runs: what :func:`model_runs` has returned for the same samples, inputs and mode; None: the model runs now.

    Raises:
        InputError: names the first output, parameter, input or buffer that differs, and says how to go on.
        ModelError: the model itself takes none of these batches.
    """
    name = type(module).__name__
    # What a run leaves in an attribute stays for the next one: a graph can't know it, and then differs.
    with preserve_state(module, training=training):
        for expected in _model_runs(module, inputs, samples, of_inputs) if runs is None else runs:
            count = f"{batch_size(expected.inputs)} samples"
            try:
                actual = _results(module, run, named, expected.inputs, of_inputs, partial(expected.compare, ulps))
            except InputError:
                raise
            except Exception as error:
                raise InputError(
                    f"the {description} of {name} fails on {count}, which the model itself takes: "
                    f"{type(error).__name__}: {error}; change that, or {reasons.way_out}"
                ) from error
            if found := expected.results.first_difference(actual, ulps, expected.eps, reasons):
                raise InputError(
                    f"the {description} of {name} does not do what the model does: with {count} {found}; change that, "
                    f"or {reasons.way_out}"
                )


class ModelRun(NamedTuple):
    """What a model itself has done, to compare a version of it with.

    Args:
        inputs: few samples.
        results: of them.
        scale: the largest element of all gradients.
        eps: relative distance of two numbers of the lowest precision that it computed in.
    """

    inputs: Tree
    results: "_Results"
    scale: float
    eps: float

    def compare(self, ulps: float, name: str, gradient: Tensor) -> str:
        """Return in words how the version's gradient of this name differs; empty where it does not."""
        return gradient_difference(self.results.gradients.get(name), gradient, ulps, self.scale, self.eps)


def model_runs(
    module: nn.Module,
    inputs: Tree,
    samples: Sequence[int],
    *,
    of_inputs: bool | Collection[int] = True,
    training: bool = True,
) -> Sequence[ModelRun]:
    """Run a model before there is a version to compare with it: :func:`check` takes what this returns.

    Args and raises: as :func:`check`. The gradients of all runs are held, in memory or in a file.
    """
    with preserve_state(module, training=training):
        return list(_model_runs(module, inputs, samples, of_inputs))


def _model_runs(
    module: nn.Module, inputs: Tree, samples: Sequence[int], of_inputs: bool | Collection[int]
) -> Iterator[ModelRun]:
    """Yield a model's runs, each when it is asked for; :func:`check` says which."""
    failures: list[Exception] = []
    for count in (*samples, None):
        if count is None and len(failures) < len(samples):
            return  # the model takes fewer than its batch has
        batch, spill = inputs if count is None else resized(inputs, count), SpillAllocator()

        def keep(_: str, gradient: Tensor, spill: SpillAllocator = spill) -> Tensor:
            return spill.kept(gradient)

        try:
            with _FloatingTypes() as types:
                named = partial(tensors_of, module)
                results = _results(module, partial(call, module), named, batch, of_inputs, keep)
        except Exception as error:
            failures.append(error)
        else:
            yield ModelRun(batch, results, max(map(largest, results.gradients.values()), default=0.0), types.eps)
    if len(failures) > len(samples):
        mode, failure = "training" if module.training else "evaluation", failures[-1]
        raise ModelError(
            f"{type(module).__name__} itself fails in {mode} on the batch that it is given: "
            f"{type(failure).__name__}: {failure}"
        ) from failure


# Seed of dropout and of r; any number would do.
_SEED = 6174


@dataclass(frozen=True)
class _Results:
    """The results of one run, under the names that a message has for them.

    Args:
        gradients: what is kept of each: of all at once there may be more than there is memory for.
        written: names of the buffers that the run has changed.
        functions: the model's own autograd Functions that its backward goes through.
    """

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Any]
    buffers: Mapping[str, Tensor]
    written: Collection[str]
    functions: tuple[str, ...]

    def first_difference(self, actual: "_Results", ulps: float, eps: float, reasons: Reasons) -> str:
        """Return in words the first thing that differs, and the likely reason; empty where nothing does."""
        reason = reasons.output
        if len(self.outputs) != len(actual.outputs):
            return f"there are {len(actual.outputs)} output tensors where the model has {len(self.outputs)}; {reason}"
        for name, value in self.outputs.items():
            if text := difference(value, actual.outputs[name], ulps, 0.0, eps):
                return f"{name} {text}; {reason}"
        reason = reasons.gradient
        if self.functions and reasons is GRAPH:
            reason = (
                f"its forward calls {', '.join(sorted(set(self.functions)))}, a torch.autograd.Function, of which "
                "torch.export keeps the operators of forward and loses backward"
            )
        for name in {**self.gradients, **actual.gradients}:
            computed = name in actual.gradients
            text = actual.gradients[name] if computed else gradient_difference(self.gradients[name], None, ulps, 0.0)
            if text:
                return f"the gradient of {name} {text}; {reason}"
        reason = reasons.buffer
        for name, value in self.buffers.items():
            if text := difference(value, actual.buffers[name], ulps, self._scale(name), eps):
                return f"{name} {text}; {reason}"
        return ""

    def _scale(self, name: str) -> float:
        """Return the largest element of what the run wrote into this buffer's module; 0 where it left this one."""
        if name not in self.written:
            return 0.0
        module = name.rpartition(".")[0]
        beside = (self.buffers[other] for other in self.written if other.rpartition(".")[0] == module)
        return max(
            (largest(buffer) for buffer in beside if buffer.is_floating_point() or buffer.is_complex()), default=0.0
        )


class _FloatingTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the floating types of all that is computed while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = set[torch.dtype]()

    @property
    def eps(self) -> float:
        """Relative distance of two numbers of the lowest precision."""
        return max((torch.finfo(dtype).eps for dtype in self._found), default=0.0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and to tell the compiler so torch imports it, for a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, result)
        return result

    def _note(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            self._found.add(tensor.dtype)
        return tensor


def _results(
    module: nn.Module,
    run: Run,
    named: Named,
    inputs: Tree,
    of_inputs: bool | Collection[int],
    keep: Callable[[str, Tensor], Any],
) -> _Results:
    """Run a version of a model, whose buffers it may write; see :func:`check` for the arguments."""
    tensors = named()
    buffers = [name for name, _ in module.named_buffers()]
    torch.clear_autocast_cache()  # of weights that another run has cast, whose backward is done
    running = {name: tensors[name] for name in buffers if name in tensors}
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    with preserve_tensors(module, running, seed=_SEED):
        sources = {f"parameter {name!r}": t for name, t in tensors.items() if t.requires_grad}
        places = iter(enumerate(place for place, _ in named_leaves(inputs)))

        def feed(tensor: Tensor) -> Tensor:
            # A clone, since a model may write into its inputs.
            index, place = next(places)
            wanted = of_inputs if isinstance(of_inputs, bool) else index in of_inputs
            if not (wanted and (tensor.is_floating_point() or tensor.is_complex())):
                return tensor.clone()
            sources[f"input{place}"] = leaf = tensor.detach().clone().requires_grad_()
            return leaf.clone()

        outputs: list[Tensor] = []
        flatten_tree(run(map_tree(feed, inputs)), outputs)
        after = dict(module.named_buffers()) | dict(named())
        return _Results(
            {f"output {index}": t.detach().clone() for index, t in enumerate(outputs)},
            _gradients(outputs, sources, keep),
            {f"buffer {name!r}": after[name].detach().clone() for name in buffers},
            [f"buffer {name!r}" for name in buffers if not torch.equal(after[name], before[name])],
            tuple(_own_functions(outputs)),
        )


def _gradients(
    outputs: list[Tensor], sources: Mapping[str, Tensor], keep: Callable[[str, Tensor], Any]
) -> dict[str, Any]:
    """Return what is kept of each gradient, released once it is final; each ``grad`` is restored."""
    outputs = [t for t in outputs if t.requires_grad]
    if not outputs or not sources:
        return {}
    kept: dict[str, Any] = {}

    def hook(name: str, leaf: Tensor) -> None:
        if leaf.grad is not None:  # a Function may return none
            kept[name], leaf.grad = keep(name, leaf.grad.to_dense()), None

    # Random, so that errors don't cancel in a sum, which a single number is not.
    generator = torch.Generator().manual_seed(_SEED)
    projection: list[Tensor] | None = None
    if len(outputs) > 1 or outputs[0].numel() != 1 or outputs[0].is_complex():
        projection = [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in outputs]
    before = {name: leaf.grad for name, leaf in sources.items()}
    hooks = [leaf.register_post_accumulate_grad_hook(partial(hook, name)) for name, leaf in sources.items()]  # type: ignore[no-untyped-call]
    try:
        for leaf in sources.values():
            leaf.grad = None
        torch.autograd.backward(outputs, projection, inputs=list(sources.values()))
    finally:
        for each in hooks:
            each.remove()
        for name, leaf in sources.items():
            leaf.grad = before[name]
    return {name: kept[name] for name in sources if name in kept}


def _own_functions(outputs: list[Tensor]) -> Iterator[str]:
    """Yield the user's subclasses of torch.autograd.Function that the outputs' gradients go through."""
    waiting: list[Any] = [t.grad_fn for t in outputs]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        kind: Any = node._forward_cls if isinstance(node, BackwardCFunction) else None  # type: ignore[attr-defined]
        if kind is None or kind.__module__.startswith(("torch.", "paceline.")):
            continue
        try:
            yield f"{kind.__qualname__} ({inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]})"
        except (OSError, TypeError):  # its source isn't in a file
            yield kind.__qualname__
