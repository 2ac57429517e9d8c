"""What is asked of a model, and its answer in pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.comm.spill import Spill
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.program import Program, Tree
from paceline.replica.built import built
from paceline.replica.outline import Rebuild
from paceline.replica.pipeline.micro_batches import sizes
from paceline.storage import State
from paceline.strategy import Strategy

Pieces: TypeAlias = Mapping[int, Sequence[Any]]
"""Micro-batch -> the leaves of the output for it."""


@dataclass(frozen=True)
class Question:
    """What is asked of all workers, but for the inputs."""

    program: Program
    strategy: Strategy
    state: State | None
    """Parameters and buffers by full name; None: A_0."""
    timeout_s: Seconds

    def model(self, spill: Spill | None = None) -> nn.Module:
        """With the state that is asked for, in evaluation mode.

        Args:
            spill: where it may lie; None: in ordinary memory.
        """
        module = self.program.build() if spill is None else built(self.program, spill)
        if self.state is not None:
            try:
                module.load_state_dict(dict(self.state))
            except RuntimeError as error:
                raise InputError(f"state does not fit the program's model: {error}") from error
        return module.eval()


@dataclass(frozen=True)
class Answer:
    """What one worker has of the output."""

    pieces: Pieces
    """Of a worker that has none of it: empty."""
    rebuild: Rebuild
    """The leaves of an output -> the output."""


def together(answers: Sequence[Answer], samples: int, micro_batches: int) -> Tree:
    """The whole output.

    Raises:
        InputError: an output that has not a row for each sample was made of several micro-batches.
    """
    pieces = {index: leaves for answer in answers for index, leaves in answer.pieces.items()}
    rows = sizes(samples, micro_batches)
    return answers[0].rebuild(
        [_joined(each, rows) for each in zip(*(pieces[i] for i in range(len(rows))), strict=True)]
    )


def _joined(leaf: Sequence[Any], rows: Sequence[int]) -> Any:
    """One leaf of the output, of which each micro-batch has made its rows."""
    if len(leaf) == 1:
        return leaf[0]
    tensors = [each for each in leaf if isinstance(each, Tensor) and each.dim()]
    if [len(each) for each in tensors] == list(rows):
        return torch.cat(tensors)
    if all(_same(each, leaf[0]) for each in leaf):
        return leaf[0]
    raise InputError(
        f"the output of micro-batches of {list(rows)} samples has shapes {[list(each.shape) for each in tensors]}, "
        "which are no rows of samples; write micro_batches=1"
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
