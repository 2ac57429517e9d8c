"""The gradient noise scale, estimated from squared norms of gradients: of micro-steps, of Δs, and of updates.

Norms are those of gradients as they are, or as Adam preconditions them. The formulas stand in
:mod:`paceline.core.noise_scale`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import Checkpoint
from paceline.core.noise_scale import NoiseAccumulator, Observation, Part, differenced, observation
from paceline.core.types import Version
from paceline.device import CPU, Reading
from paceline.replica.base import MicroStepNorms
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.optimizer_state import whole_chunks

# Updates of Adam before its second moments are used, as in AdaptDL: the first ones say little.
WARM_STEPS = 5

# Elements whose squares are summed in their own precision before float64 sums the rest: as fast as one norm of all,
# whose relative error in float32 is 3.6e-4 at 10^7 elements, where that of this is 1e-9 (torch 2.13 on a CPU).
ROW = 1024

# A number of the host's, or a tensor of one element that a device computes.
Number: TypeAlias = float | Tensor

# Names of the Δ that is kept begin so.
_KEPT = "delta/kept/"

# Divisors of the elements, for each vector of a state.
Scales: TypeAlias = Sequence[Tensor]


def square(vectors: Iterable[Tensor], scales: Scales | None = None) -> Number:
    """Return the square of the Euclidean norm over all vectors, each element divided by its scale if there are scales.

    Of vectors on a device it is a tensor there, float64, for which the host does not wait.

    >>> square([torch.tensor([3.0, 4.0])]), square([torch.tensor([6.0, 2.0])], [torch.tensor([2.0, 0.5])])
    (25.0, 25.0)
    """
    total: Number = 0.0
    norm = torch.linalg.vector_norm
    for vector in vectors if scales is None else (v / s for v, s in zip(vectors, scales, strict=True)):
        # In float32 at least: half precision would round away the differences that the noise scale is made of.
        flat, dtype = vector.reshape(-1), torch.promote_types(vector.dtype, torch.float32)
        body = len(flat) // ROW * ROW
        rows = norm(flat[:body].view(-1, ROW), dim=1, dtype=dtype) if body else flat[:0]
        parts = [norm(part, dtype=d) for part, d in ((rows, torch.float64), (flat[body:], dtype)) if len(part)]
        for part in parts:
            length = float(part) if part.device == CPU else part.double()
            total += length * length  # a product may be infinite, a power raises
    return total


class LateNumbers(NamedTuple):
    """What follows from numbers that a device computes, and that are read later."""

    numbers: Sequence[Number]
    follows: Callable[[Sequence[float]], Any]
    """Of the numbers as they are read."""
    reading: Reading | None
    """Of those that a device has; None: of none."""

    @classmethod
    def of(cls, numbers: Sequence[Number], follows: Callable[[Sequence[float]], Any]) -> "LateNumbers":
        """Begin to copy to the host those numbers that are on a device."""
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        return cls(numbers, follows, Reading(tensors) if tensors else None)

    def read(self) -> Any:
        """Return what follows; waits for the device, for what it was given up to these numbers."""
        late = iter(self.reading.numbers() if self.reading is not None else ())
        return self.follows([next(late) if isinstance(each, Tensor) else each for each in self.numbers])


class Preconditioner:
    """The scale of each element in which an optimizer measures gradients: √v̂ + ε under Adam and AdamW, else 1.

    Adam steps by m/(√v̂ + ε) rather than by g, so it is noise in g/(√v̂ + ε) that counts: the preconditioned gradient
    noise scale of Pollux (Qiao et al. 2021, arXiv 2008.12260). v̂ is the second moment before the update that is
    measured.

    Args:
        optimizer: its second moments are used; None: this process has no optimizer.
    """

    def __init__(self, optimizer: FlatOptimizer | None) -> None:
        self._optimizer = optimizer if optimizer is not None and optimizer.adaptive else None
        self.plain = self._optimizer is None
        """True if gradients are measured as they are."""

    def scales(self) -> Scales | None:
        """Return the scales for the update that comes now; None: all are 1."""
        if self._optimizer is None:
            return None
        scales = [
            (v / (1 - group["betas"][1] ** steps)).sqrt_().add_(group["eps"]).reshape(-1)
            for v, steps, group in self._optimizer.second_moments()
        ]
        layout = self._optimizer.state.layout
        if len(scales) == len(layout.parameters):
            return scales
        if len(scales) != len(layout.parameter_names):  # something has no second moment
            return None
        each = iter(scales)
        return [torch.cat([next(each) for _ in block.entries]) for block in layout.parameters]


class MicroNorms:
    """Adds up the gradients of a Δ's micro-steps, and the squares of their norms."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin a new Δ."""
        self.sums: list[Tensor] = []
        """Sums of the gradients that were added."""
        self._squares: Number = 0.0
        self._pieces = self._samples = 0

    def add(self, gradients: list[Tensor], samples: int) -> None:
        """Add a micro-step's gradients.

        Args:
            gradients: ``samples`` times those of its mean loss; kept, and added to.
            samples: of it.
        """
        self._squares += square(gradients) / samples
        self._pieces += 1
        self._samples += samples
        if self.sums:
            torch._foreach_add_(self.sums, gradients)
        else:
            self.sums = gradients

    def norms(self) -> MicroStepNorms:
        """Return the norms of a Δ that has had a micro-step."""
        return MicroStepNorms(self._squares / self._samples, self._pieces)


class ObservedDelta(NamedTuple):
    """One Δ of an update, with what the estimate needs.

    Args:
        version: version of the A that it was computed at.
    """

    delta: FlatState
    weight: float
    samples: int
    version: Version
    micro: MicroStepNorms | None = None


class NoiseEstimator:
    """Estimates the noise scale in a process that applies all Δs of a run.

    An update of several Δs is observed by itself. An update of one Δ is observed by its micro-steps; if it has one
    micro-step, two such updates in a row are taken together (:func:`~paceline.core.noise_scale.differenced`)::

        update   Δ1   Δ2   Δ3   Δ4
        kept     Δ1        Δ3          a copy, until the next has come
        observed      1,2       3,4

    Args:
        accumulator: takes the observations.
        late: whether the norms of an update on a device are read when those of the next one are there.
    """

    def __init__(self, accumulator: NoiseAccumulator, *, late: bool = False) -> None:
        self._accumulator, self._late = accumulator, late
        self._unread: LateNumbers | None = None
        """An observation that has been measured and not read."""
        self.preconditioner = Preconditioner(None)
        """That of the optimizer which steps on the observed Δs."""
        self._scales: Scales | None = None
        self._updates = 0
        self._parts: list[tuple[Part, Number, Version]] = []
        """Parts of an update, whose squares stand beside them."""
        self._square: Number | None = None
        self._kept: tuple[list[Tensor], Part, Version] | None = None

    def through(self, deltas: Iterable[ObservedDelta], count: int) -> Iterator[tuple[FlatState, float]]:
        """Yield the Δs of one update and their weights, each observed before.

        Args:
            deltas: may compute each when it is taken.
            count: how many there are.
        """
        self._parts, self._square = [], None
        ready = self.preconditioner.plain or self._updates >= WARM_STEPS
        self._scales = self.preconditioner.scales() if ready else None
        for each in deltas:
            if ready:
                self._observe(each, alone=count == 1)
            yield each.delta, each.weight

    def combined(self, total: list[Tensor]) -> None:
        """Observe what the Δs of the update were combined to."""
        if len(self._parts) > 1:
            self._square = square(total, self._scales)

    def updated(self) -> None:
        """End an update."""
        self._updates += 1
        if self._square is not None:
            parts, squares, versions = zip(*self._parts, strict=True)
            biased, numbers = len(set(versions)) > 1, (*squares, self._square)
            self._add(numbers, lambda read: observation(_squared(parts, read), read[-1], biased=biased))
            self._kept = None

    def chunks(self, layout: FlatLayout) -> list[TensorChunk]:
        """Return the Δ that is kept until the next has come."""
        return [] if self._kept is None else whole_chunks(FlatState(layout, self._kept[0], []), _KEPT)

    def state_json(self) -> dict[str, Any]:
        """Return what is no tensor; what was accumulated is in the history's state."""
        kept = None if self._kept is None else [list(self._kept[1]), self._kept[2]]
        return {"updates": self._updates, "kept": kept}

    def restore(self, saved: Mapping[str, Any], checkpoint: Checkpoint, like: FlatState) -> None:
        """Go on from a checkpoint.

        Args:
            saved: what :meth:`state_json` returned.
            checkpoint: has the Δ that was kept.
            like: a state of the layout and on the device of A.
        """
        self._updates = saved["updates"]
        if saved["kept"] is not None:
            part, version = saved["kept"]
            delta = FlatLayout(like.layout.parameters, ()).new(device=like.device)
            checkpoint.read_into(whole_chunks(delta, _KEPT))
            self._kept = delta.parameters, Part(*part), version

    def settle(self) -> None:
        """Read what has been measured and not read."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._accumulator.add(unread.read())

    def _add(self, numbers: Sequence[Number], follows: Callable[[Sequence[float]], Observation | None]) -> None:
        """Add the observation that follows from these numbers once they are read."""
        self.settle()
        self._unread = LateNumbers.of(numbers, follows)
        if not self._late:
            self.settle()

    def _observe(self, seen: ObservedDelta, *, alone: bool) -> None:
        norm = square(seen.delta.parameters, self._scales)
        # Norms of micro-steps are not preconditioned.
        pieces = seen.micro if self.preconditioner.plain else None
        own, count = pieces or (norm, 1)
        part = Part(seen.samples, seen.weight, 0.0, count)
        self._parts.append((part, own, seen.version))
        if alone and part.pieces > 1:
            weight = seen.weight**2
            self._add((own, norm), lambda read: observation(_squared([part], read), read[1] * weight))
        elif alone and part.samples and self._kept is None:
            self._kept = [v.clone() for v in seen.delta.parameters], part, seen.version
        elif alone and part.samples:
            assert self._kept is not None
            (vectors, first, version), self._kept = self._kept, None
            share = first.samples / (first.samples + part.samples)
            mean = [torch.lerp(new, old, share) for new, old in zip(seen.delta.parameters, vectors, strict=True)]
            biased = version != seen.version
            self._add(
                (square(vectors, self._scales), norm, square(mean, self._scales)),
                lambda read: differenced(
                    first._replace(square=read[0]), part._replace(square=read[1]), read[2], biased=biased
                ),
            )


def _squared(parts: Sequence[Part], squares: Sequence[float]) -> list[Part]:
    """Return parts with their squares."""
    return [part._replace(square=number) for part, number in zip(parts, squares, strict=False)]
