"""One training step on A_0 before anything starts: finds what has to be refused, and what the step writes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.checkpoint.fingerprint import fingerprint, optimizer_fields, scheduler_text
from paceline.comm.shared_memory import SpillAllocator
from paceline.core.errors import InputError, PacelineError
from paceline.device import exclusive_generator
from paceline.engine.program_modules import program_modules
from paceline.optim.lbfgs import LossOptimizer
from paceline.optim.several import OptimizerOfParts
from paceline.program import Program, Tree, accuracy, apart, call, leaves
from paceline.replica.base import Batch
from paceline.replica.capture.input_spec import resized
from paceline.replica.flat_state import digest
from paceline.replica.module_utils import materialize
from paceline.replica.optimizer_factory import build_optimizer
from paceline.replica.step_options import OptionsCodec

# Samples of the step where batches are sized for an accelerator or several stages: it runs on this CPU all the same.
FEW = 2

NO_PARAMETER = "the loss does not depend on any parameter; is there a detach() or no_grad() on the way?"


@dataclass(frozen=True)
class DryRun:
    """Results of the step."""

    metrics: Mapping[str, Callable[[Tree, Tree], Any]]
    """The program's metrics, or accuracy where the output is scores and the target classes."""
    running_buffers: tuple[str, ...]
    """Names of the buffers that the step wrote."""
    written: tuple[str, ...]
    """Names of the trainable parameters that forward or backward wrote."""
    learning_rate: float | None
    """Learning rate of the optimizer's first group."""
    on_losses: bool
    """Whether the optimizer's steps take the loss, too."""
    fingerprint: Mapping[str, str]
    """What tells this program from others."""
    optimizer: Any = field(compare=False)
    """What makes the optimizer of all parameters, where the program has several, too."""
    options: tuple[float, ...]
    """Its options, as :mod:`~paceline.replica.step_options` encodes them."""
    modules: tuple[str, ...] = ()
    """Installed modules that the program needs."""


def dry_run(program: Program, batch: Batch | None, *, few: bool = False) -> DryRun:
    """Make one step on a throw-away module.

    Args:
        program: what is trained.
        batch: the first one; None: a loop's own code makes the steps, so the model is built and no step is made.
        few: whether a few of its samples do, where they can be taken alone.

    Raises:
        InputError: the model can't take the batch, its output does not fit the loss, the loss is no scalar, leads to
            no parameter or has some of its own, or optimizer, scheduler or a metric can't be made.
    """
    if few and batch is not None and batch.samples > FEW:
        with suppress(PacelineError):  # what is wrong is said of the batch itself
            inputs, targets = cast(tuple[Tree, Tree], resized((batch.input, batch.target), FEW))
            return _step(program, Batch(inputs, targets, FEW))
    return _step(program, batch)


def _step(program: Program, batch: Batch | None) -> DryRun:
    """Make the step, with all samples of this batch; None: without it."""
    with exclusive_generator():
        with _named("model() failed"):
            module = materialize(program, SpillAllocator()).train()
        lazy = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if is_lazy(t)]
        if lazy:
            raise InputError(
                f"{lazy[0]} has no shape before a first forward pass; give the layer its sizes, nn.Linear(in, out) for "
                "instance, or let model() call the module once"
            )
        buffers = {name: _Seen.of(buffer) for name, buffer in module.named_buffers()}
        parameters = {name: _Seen.of(p) for name, p in module.named_parameters() if p.requires_grad}
        fields = fingerprint(program, module)
        if isinstance(program.optimizer, Mapping):
            program = replace(program, optimizer=OptimizerOfParts.of(program.optimizer, module))
        metrics: Mapping[str, Callable[[Tree, Tree], Any]] = program.metrics or {}
        if batch is not None:
            output, loss = _forward(program, module, batch)
            _backward(module, loss)
            metrics = _metrics(program, output, program.labels(batch.input, batch.target))
        elif isinstance(program.loss, nn.Module):
            _refuse_parameters([parameter for parameter in program.loss.parameters() if parameter.requires_grad])
        written = _changed(module.named_parameters(), parameters)
        optimizer = _optimizer(program, {n: p for n, p in module.named_parameters() if p.requires_grad})
        options = OptionsCodec.of(optimizer)
        vector = options.encode(options.numbers(optimizer), range(len(options.keys)))
        fields |= optimizer_fields(optimizer)
        fields["scheduler"] = scheduler_text(_scheduler(program, optimizer))
        # With the scheduler: it has set the rate of the first step.
        rate = optimizer.param_groups[0].get("lr")
    return DryRun(
        metrics,
        # What a loop's own step writes is not known: any of them.
        tuple(buffers) if batch is None else _changed(module.named_buffers(), buffers),
        written,
        None if rate is None else float(rate),
        isinstance(optimizer, LossOptimizer),
        fields,
        program.optimizer,
        tuple(vector.tolist()),
        program_modules(program, module),
    )


def _forward(program: Program, module: nn.Module, batch: Batch) -> tuple[Tree, Tensor]:
    """Return the output and the loss, which is a scalar that depends on a parameter."""
    loss: Any
    with program.autocast("cpu"):
        with _named(f"the model can't take a batch of the training set (input {_shapes(batch.input)})"):
            output = call(module, batch.input)
        with _named(f"the model's output {_shapes(output)} does not fit the loss on target {_shapes(batch.target)}"):
            loss = apart(program.loss)(output, batch.target)
    if not isinstance(loss, Tensor):
        raise InputError(f"loss returned {type(loss).__name__}, not a tensor; write a loss that returns a torch scalar")
    if loss.numel() != 1 or loss.dim():
        raise InputError(
            f"loss returned a tensor of shape {tuple(loss.shape)}, not a scalar; take its mean over the batch "
            "(reduction='mean')"
        )
    if not loss.requires_grad:
        raise InputError(NO_PARAMETER)
    of_model = {id(parameter) for parameter in (*module.parameters(), *_parameters_behind(leaves(output)))}
    _refuse_parameters([parameter for parameter in _parameters_behind([loss]) if id(parameter) not in of_model])
    return output, loss


def _refuse_parameters(own: Sequence[Tensor]) -> None:
    """Raise InputError if a loss depends on parameters that are not the model's."""
    if own:
        shapes = ", ".join(str(list(parameter.shape)) for parameter in own[:3])
        raise InputError(
            f"the loss has parameters of its own, of shapes {shapes}, which no optimizer would train; put them into "
            "the model, which makes the loss then: write loss='model'; or requires_grad_(False) on those that stay as "
            "they are"
        )


def _parameters_behind(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that tensors were computed from."""
    found = list[Tensor]()
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = set[Any](waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)  # of a leaf
        if isinstance(variable, nn.Parameter):
            found.append(variable)
        following = {each for each, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        waiting += following
    return found


def _backward(module: nn.Module, loss: Tensor) -> None:
    """Run the backward pass without keeping gradients."""
    reached = False

    def drop(parameter: Tensor) -> None:
        nonlocal reached
        reached |= parameter.grad is not None  # an autograd.Function may return none
        parameter.grad = None

    with ExitStack() as hooks, _named("loss.backward() failed"):
        for parameter in module.parameters():
            if parameter.requires_grad:  # the module may be the user's own: the hooks are removed again
                hooks.callback(parameter.register_post_accumulate_grad_hook(drop).remove)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
    if not reached:
        raise InputError(NO_PARAMETER)


class _Seen(NamedTuple):
    """A tensor before the step: a digest instead of a copy, since a model may fill most of the memory."""

    tensor: Tensor
    version: int
    """Counts writes, also those that leave the values, but not those to ``.data``, which the digest tells."""
    digest: str

    @classmethod
    def of(cls, tensor: Tensor) -> "_Seen":
        return cls(tensor, tensor._version, digest([tensor]))


def _changed(tensors: Iterable[tuple[str, Tensor]], before: Mapping[str, _Seen]) -> tuple[str, ...]:
    """Return the names of those that were written, or that others have taken the place of."""

    def changed(tensor: Tensor, seen: _Seen) -> bool:
        same = tensor is seen.tensor and tensor._version == seen.version
        return not same or digest([tensor]) != seen.digest

    return tuple(name for name, tensor in tensors if name in before and changed(tensor, before[name]))


def _metrics(program: Program, output: Tree, target: Tree) -> Mapping[str, Callable[[Tree, Tree], Any]]:
    """Return the program's metrics, checked; by default accuracy if the output is one row of scores per class index."""
    if program.metrics is None:
        of_model = program.model_makes_loss
        rows = scores(output) if of_model else output
        if not (isinstance(rows, Tensor) and isinstance(target, Tensor)):
            return {}
        classes = not target.is_floating_point() and target.dtype != torch.bool
        fits = rows.dim() == target.dim() + 1 and rows.shape[:-1] == target.shape
        # Labels of words may be shifted by one, or be left out, within the model.
        fits &= not of_model or target.dim() == 1
        return {"accuracy": accuracy_of_model if of_model else accuracy} if classes and fits else {}
    if "loss" in program.metrics:
        raise InputError("metrics={'loss': …}: test_loss is the program's loss in every record; write another name")
    for name, metric in program.metrics.items():
        with torch.no_grad(), _named(f"metric {name!r} must give one number for output and target"):
            float(metric(output, target))
    return program.metrics


def scores(output: Tree) -> Tree:
    """Return the scores of an output, which a model that makes its loss returns as ``logits`` beside it."""
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)


def accuracy_of_model(output: Tree, target: Tensor) -> Tensor:
    """Return :func:`accuracy` of the ``logits`` of an output."""
    return accuracy(scores(output), target)


def _optimizer(program: Program, parameters: Mapping[str, Tensor]) -> Optimizer:
    """Return the program's optimizer, of all parameters that are trained; they are given by name."""
    optimizer: Any
    with _named("optimizer(parameters) failed"):
        optimizer = build_optimizer(program.optimizer, parameters.values())
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"optimizer(parameters) returned {type(optimizer).__name__}, not a torch optimizer; "
            "write optimizer=functools.partial(torch.optim.SGD, lr=0.01)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "torch's LBFGS calls the loss several times a step, but here each update is made of one evaluation; write "
            "optimizer=paceline.LBFGS, which makes the same steps"
        )
    found = {id(p) for group in optimizer.param_groups for p in group["params"]}
    absent = [name for name, parameter in parameters.items() if id(parameter) not in found]
    if absent or len(found) > len(parameters):
        what = f"has no {absent[0]}" if absent else "has parameters that it was not given"
        raise InputError(
            f"the optimizer {what}; write it of all parameters of the model that have requires_grad, or set "
            "requires_grad=False on what is not to be trained"
        )
    return optimizer


def _scheduler(program: Program, optimizer: Optimizer) -> Any:
    """Return the scheduler, or None; it counts steps alone."""
    if program.scheduler is None:
        return None
    scheduler: Any
    with _named("scheduler(optimizer) failed"):
        scheduler = program.scheduler(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "step"):
        raise InputError(
            f"scheduler {type(scheduler).__name__} can't be stepped once per update; write one that counts steps, "
            "such as torch.optim.lr_scheduler.CosineAnnealingLR"
        )
    return scheduler


@contextmanager
def _named(failure: str) -> Iterator[None]:
    """Context manager: turn an error of the user's code into an InputError that names the call."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raise InputError(f"{failure}: {type(error).__name__}: {error}") from error


def _shapes(tree: Tree) -> str:
    tensors = leaves(tree)
    if not tensors:
        return type(tree).__name__
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)
