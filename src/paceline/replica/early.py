"""Gradients told of while the backward pass that makes the others still goes on.

::

    backward    | head ...... | fc ............... | conv ......................... |
    told of                    ^ head.weight, .bias ^ fc.weight, .bias               ^ conv.weight, .bias
"""

from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.replica.autograd import Autograd
from paceline.replica.base import Sink


class Early:
    """One replica's, Δ after Δ.

    A gradient is final once a backward pass has added to it, unless it does so twice (layers that reentrant checkpoints
    share). So the first Δ is told of at its end, and of whom it added to twice, always.

    Args:
        autograd: makes the gradients.
        sink: is told.
        mean: whether they are sums over samples, to be divided by their number.
    """

    def __init__(self, autograd: Autograd, sink: Sink, *, mean: bool) -> None:
        self._autograd, self._sink, self._mean = autograd, sink, mean
        self._told: set[int] = set()
        self._added_to: set[int] = set()
        """In the last pass of this Δ, so far."""
        self._twice: set[int] = set()
        """In the last pass of some Δ."""
        self._knows = self._last = False
        self._samples = 0
        self._watch = autograd.watch(self._added)

    def close(self) -> None:
        """Let the parameters be as they were."""
        self._watch.close()

    def opens(self) -> None:
        """A new Δ begins."""
        self._told.clear()
        self._last = False

    def passes(self, samples: int) -> None:
        """A backward pass begins, with which Δ is of so many samples."""
        self._added_to.clear()
        self._last, self._samples = self._sink.last(), samples

    def rest(self, gradients: list[Tensor], samples: int) -> None:
        """All gradients are final."""
        self._samples = samples
        for index, gradient in enumerate(gradients):
            if index not in self._told:
                self._tell(index, gradient)
        self._knows |= self._last
        self._last = False

    def _added(self, index: int) -> None:
        if not self._last:
            return
        if index in self._told:
            raise PacelineError(self._too_late(index))
        if index in self._added_to:
            self._twice.add(index)
        self._added_to.add(index)
        if self._knows and index not in self._twice:
            self._tell(index, self._autograd.dense_gradient(index))

    def _tell(self, index: int, gradient: Tensor) -> None:
        if self._mean and self._samples:
            gradient.div_(self._samples)
        self._told.add(index)
        self._sink.ready(index, gradient, self._samples)

    def _too_late(self, index: int) -> str:
        name = self._autograd.layout.parameter_names[index]
        return (
            f"a backward pass added twice to the gradient of {name}, which none before it did, so a part of it has "
            "been sent already; write use_reentrant=False where checkpoint() is called"
        )
