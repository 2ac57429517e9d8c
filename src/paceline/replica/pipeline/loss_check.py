"""Check that the loss of a batch is the mean of those of its micro-batches, weighed by their samples."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.program import Program, Tree, call
from paceline.replica.base import Batch
from paceline.replica.capture.input_spec import flatten_tree
from paceline.replica.module_utils import preserve_state
from paceline.replica.pipeline.micro_batches import micro_batch_sizes, select_rows

# Units of the last place: a loss that is added up in two orders differs by a few.
ROUNDING = 64
# Where the model runs, too: products of n terms, added up in an order that depends on the rows, differ by about √n.
ROUNDING_OF_MODEL = 512


def check_loss(program: Program, module: nn.Module, batch: Batch, count: int) -> None:
    """Raise InputError where the loss of a batch is not Σ n_i/n · loss_i over its micro-batches.

    The model computes the output once for the whole batch, in training, and only the loss is compared, on rows of it:
    dropout and BatchNorm do something else with each micro-batch. Where the output of a micro-batch is not some rows of
    the batch's (samples along another dim, a number for each pair of them), or where the model makes the loss itself,
    it runs on each micro-batch, in evaluation.

    Args:
        program: holds the loss.
        module: the model; left as it is.
        batch: any.
        count: m.
    """
    of_model = program.model_makes_loss
    bounds = pairwise([0, *accumulate(micro_batch_sizes(batch.samples, count))])
    slices = [slice(start, stop) for start, stop in bounds]
    with preserve_state(module, training=not of_model), torch.no_grad():
        output, whole = _of_batch(program, module, batch)
        if not of_model:
            try:
                losses = [_loss(program, select_rows(output, batch.samples, rows), batch, rows) for rows in slices]
            except InputError:
                if _in_rows(module, batch, output, slices[0]):
                    raise
            else:
                refusal = _difference(whole, losses, batch.samples, slices, _relative(whole, ROUNDING))
                if not refusal:
                    return
                if _in_rows(module, batch, output, slices[0]):
                    raise InputError(refusal)
    with preserve_state(module, training=False), torch.no_grad():
        _, whole = _of_batch(program, module, batch)
        losses = [_loss(program, _run(module, batch, rows), batch, rows) for rows in slices]
    relative = _relative(whole, ROUNDING_OF_MODEL)
    if program.precision != "fp32":  # the mean of errors of a unit each is below a unit
        relative = torch.finfo(torch.bfloat16).eps
    if refusal := _difference(whole, losses, batch.samples, slices, relative):
        raise InputError(refusal)


def _of_batch(program: Program, module: nn.Module, batch: Batch) -> tuple[Tree, Tensor]:
    """Return output and loss of a whole batch."""
    try:
        output = call(module, batch.input)
        return output, program.loss(output, batch.target)
    except Exception as error:
        raise InputError(f"the model or its loss fails on the first batch: {type(error).__name__}: {error}") from error


def _run(module: nn.Module, batch: Batch, rows: slice) -> Tree:
    """Return a micro-batch's output."""
    try:
        return call(module, select_rows(batch.input, batch.samples, rows))
    except Exception as error:
        raise InputError(
            f"the model fails on a micro-batch of {rows.stop - rows.start} of the first batch's {batch.samples} "
            f"samples: {type(error).__name__}: {error}; write a model that takes any number of samples, or "
            "micro_batches=1"
        ) from error


def _loss(program: Program, output: Tree, batch: Batch, rows: slice) -> Tensor:
    """Return the loss of a micro-batch's output."""
    try:
        return program.loss(output, select_rows(batch.target, batch.samples, rows))
    except Exception as error:
        raise InputError(
            f"the loss was given a micro-batch of {rows.stop - rows.start} of the first batch's {batch.samples} "
            f"samples, and failed: {type(error).__name__}: {error}; a pipeline needs a loss that takes any number of "
            "samples, and is a mean over them: write one, or micro_batches=1"
        ) from error


def _in_rows(module: nn.Module, batch: Batch, output: Tree, rows: slice) -> bool:
    """Return whether a micro-batch's output has the shapes of those rows of the batch's."""

    def shapes(tree: Tree) -> list[Any]:
        tensors: list[Tensor] = []
        flatten_tree(tree, tensors)
        return [tensor.shape for tensor in tensors]

    try:
        own = _run(module, batch, rows)
    except InputError:  # a BatchNorm of one sample, say: what the rows have shown stands
        return True
    return shapes(own) == shapes(select_rows(output, batch.samples, rows))


def _relative(whole: Tensor, units: int) -> float:
    return units * torch.finfo(whole.dtype).eps


def _difference(whole: Tensor, losses: Sequence[Tensor], samples: int, slices: Sequence[slice], relative: float) -> str:
    """Return in words how the losses of a batch and of its micro-batches differ; empty where they don't."""
    # In the order in which a pipeline adds them.
    weighed = [loss * ((rows.stop - rows.start) / samples) for loss, rows in zip(losses, slices, strict=True)]
    total = float(sum(weighed))
    if abs(total - float(whole)) <= relative * max(1.0, abs(float(whole))):
        return ""
    return (
        f"the loss of the first batch is {float(whole):.6g}, but of its {len(losses)} micro-batches {total:.6g}, "
        "weighed by their samples: it is no mean over samples (a sum, or a mean over what some samples have more "
        "of), so a pipeline would train something else; write a loss that is, or micro_batches=1"
    )
