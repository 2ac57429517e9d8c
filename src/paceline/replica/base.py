"""The contract of replicas: adopt an A, make micro-steps on batches of data, hand over Δ."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from paceline.core.delta import Accumulated, Change, Delta, Distance
from paceline.core.errors import InputError
from paceline.core.types import Clock
from paceline.program import Tree, leaves
from paceline.replica.flat_state import FlatState
from paceline.replica.late_figures import LateFigures


class Batch(NamedTuple):
    """The data D of one micro-step.

    Args:
        samples: 0: this replica got nothing in the data's last round; Δ is then zero.
    """

    input: Tree
    target: Tree
    samples: int


EMPTY = Batch(None, None, 0)


def as_pair(item: Any, *, whole: bool = False) -> tuple[Tree, Tree]:
    """Return (input, target) of a batch; of a dict that is no pair ``"labels"`` is the target, the rest the input.

    Args:
        item: a pair, or a dict.
        whole: whether a batch, whatever it is, is the input, of which the model makes its loss; the target is empty.

    Raises:
        InputError: the item is anything else.
    """
    if whole:
        return dict(item) if isinstance(item, Mapping) else item, ()
    if isinstance(item, Mapping):
        if "labels" not in item or len(item) == 1:
            raise InputError(
                f"a batch is a dict of {', '.join(map(repr, item))}; which of them is the target? Name it 'labels' "
                "(rename_column, or collate_fn=), or let collate_fn= return (input, target); or write loss='model', if "
                "the model makes its loss"
            )
        return {name: value for name, value in item.items() if name != "labels"}, item["labels"]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise InputError(
            f"a batch must be (input, target), but is {type(item).__name__}"
            f"{f' of {len(item)}' if isinstance(item, (tuple, list)) else ''}; put several inputs in one tuple or dict"
        )
    return item[0], item[1]


def as_batch(item: Any, *, whole: bool = False) -> Batch:
    """Return a batch as it is, or make one of (input, target) with samples along dim 0 of the target's first tensor.

    Args:
        item: a batch, a pair or a dict.
        whole: see :func:`as_pair`; samples are then along dim 0 of the first tensor that has dims.

    Raises:
        InputError: it is none of these, or has no tensor with samples.
    """
    if isinstance(item, Batch):
        return item
    inputs, targets = as_pair(item, whole=whole)
    tensors = leaves(targets) or leaves(inputs)
    tensors = [tensor for tensor in tensors if tensor.dim()] if whole else tensors
    if not tensors or not tensors[0].dim():
        raise InputError("a batch needs a tensor with samples along dim 0; write (inputs, targets), two tensors")
    return Batch(inputs, targets, len(tensors[0]))


class Measured(NamedTuple):
    """The measurements of a Δ.

    Args:
        loss: mean over its samples; NaN where it has none.
        micro: the norms of its micro-steps' gradients, if they were requested.
        late: has the loss and whether Δ is finite, if these were not read yet; until then NaN and True stand for them.
    """

    loss: float
    samples: int
    finite: bool
    micro: "MicroStepNorms | None" = None
    late: LateFigures | None = None

    def known(self) -> "Measured":
        """Return the same with loss and finite read; waits for them."""
        if self.late is None:
            return self
        loss, finite = self.late.read()
        return Measured(loss, self.samples, finite, self.micro)


class MicroStepNorms(NamedTuple):
    """The norms of the gradients of a Δ's micro-steps, of n_k samples each and n together.

    Args:
        square: Σ n_k/n · |g_k|²; a tensor of one element where a device has computed it.
        pieces: micro-steps that had samples.
    """

    square: float | Tensor
    pieces: int


class Replica(ABC):
    """Computes Δ(A, D) in one or more micro-steps: adopt, advance, ..., advance, finish."""

    @abstractmethod
    def adopt(self, state: FlatState) -> None:
        """Take the A that was sent; ``state`` stays unchanged until :meth:`finish` has returned."""

    @abstractmethod
    def advance(self, batch: Batch, clock: Clock) -> float:
        """Make one micro-step, seeded by (program seed, replica, clock).

        Args:
            batch: its data.
            clock: the number of the micro-step, from 0.

        Returns:
            The mean loss over its samples; NaN where it has none, or where another worker computes it or it is
            read late.
        """

    @abstractmethod
    def finish(self, out: FlatState) -> Measured:
        """Write Δ, and the buffers as they are now, into ``out``; returns Δ's measurements."""


class GradientSink(ABC):
    """Receives the gradients of a Δ one by one, each as soon as it is final, while backward computes the others."""

    @abstractmethod
    def is_last_micro_step(self) -> bool:
        """Return True if the micro-step that begins is the last of its Δ."""

    @abstractmethod
    def ready(self, index: int, gradient: Tensor, samples: int) -> None:
        """Take a final gradient; called once for each parameter of a Δ, in any order.

        Args:
            index: of the parameter, in the layout's order.
            gradient: read at once, or not at all.
            samples: of the whole Δ.
        """


def micro_steps(delta: Delta) -> int:
    """Return the number of batches that one Δ takes.

    >>> micro_steps(Accumulated(4)), micro_steps(Change(16))
    (4, 16)
    """
    if isinstance(delta, Accumulated):
        return delta.micro_steps
    return delta.steps if isinstance(delta, (Change, Distance)) else 1
