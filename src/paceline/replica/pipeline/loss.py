"""Whether the loss of a batch is the mean of its micro-batches' losses, without which a pipeline is not exact."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.program import Program, Tree, call
from paceline.replica.base import Batch
from paceline.replica.outline import taken_apart
from paceline.replica.pipeline.micro_batches import sizes
from paceline.replica.undisturbed import undisturbed

ROUNDING = 64
"""In units of the last place: a loss that is added up in two orders differs by a few."""


def refuse_loss(program: Program, module: nn.Module, batch: Batch, count: int) -> None:
    """Raise InputError where the loss of a batch is not Σ n_i/n · loss_i over its micro-batches.

    Args:
        program: says the loss.
        module: gives the output, once for the whole batch, so that only the loss is looked at.
        batch: any.
        count: m.
    """
    with undisturbed(module), torch.no_grad():
        output = call(module, batch.input)
        whole = program.loss(output, batch.target)
        losses = [
            program.loss(rows(output, batch.samples, piece), rows(batch.target, batch.samples, piece)) * share
            for piece, share in _pieces(sizes(batch.samples, count))
        ]
    total = float(sum(losses))
    bound = ROUNDING * torch.finfo(whole.dtype).eps * max(1.0, abs(float(whole)))
    if not abs(total - float(whole)) <= bound:
        raise InputError(
            f"the loss of the first batch is {float(whole):.6g}, but of its {len(losses)} micro-batches {total:.6g}, "
            "weighed by their samples: it is no mean over samples (a sum, or a mean over what some samples have more "
            "of), so a pipeline would train something else; write a loss that is, or micro_batches=1"
        )


def rows(tree: Tree, samples: int, piece: slice) -> Tree:
    """A tree with some rows of each tensor that has one for each sample."""
    found: list[Tensor] = []
    rebuild = taken_apart(tree, found)
    return rebuild([leaf[piece] if leaf.dim() and len(leaf) == samples else leaf for leaf in found])


def _pieces(each: Sequence[int]) -> Iterator[tuple[slice, float]]:
    """Which rows a micro-batch has, and its share of all."""
    start = 0
    for size in each:
        yield slice(start, start + size), size / sum(each)
        start += size
