"""What the paper leaves open: each an option with a default, none of them tuned for a table."""

from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.clock.distributions import show


@dataclass(frozen=True)
class Assumptions:
    """One reading of the paper's protocol; the same for all algorithms of a comparison.

    >>> str(Assumptions(combine="mean"))
    'combine=mean'
    """

    combine: str = "sum"
    """``sum`` adds the gradients of an update, ``mean`` averages them."""
    loss: str = "mean"
    """Over a batch; the paper's equation 1 has ``sum``."""
    count: str = "received"
    """What u counts: gradients ``received``, or updates made (``applied``)."""
    initial: float = 1
    """K at the start."""
    increment: float = 1
    """What each step adds to K."""
    cap: int = 25
    """The largest K."""
    hold: bool = True
    """Whether a worker waits for the update that its gradient is in, or goes on at once."""
    negative: str = "clip"
    """A delay below zero is none (``clip``), or its magnitude (``abs``)."""
    hidden: int = 64
    """Units in the hidden layer of the model for random data; 0: a linear model."""
    clusters: int = 2
    """Of each class of the random data."""
    pixels: str = "unit"
    """Of images: from 0 to 1 (``unit``), or with mean 0 and deviation 1 (``standard``)."""
    apply_s: float = 0.008
    """Server time of an update."""
    gradient_s: float = 0.0
    """Server time of each gradient in an update, on top."""
    compute_s: float | None = None
    """Time of a gradient; None: as measured on one core of this host."""
    rate: float = 0.01
    """Learning rate."""
    workers: int = 25

    def __str__(self) -> str:
        """What differs from the defaults, in one line."""
        said = [f"{f.name}={_shown(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(said) or "defaults"

    @classmethod
    def parse(cls, text: str) -> "Assumptions":
        """What :meth:`__str__` wrote.

        >>> Assumptions.parse("combine=mean hold=false").hold
        False
        """
        if text == "defaults":
            return cls()
        given = dict(word.split("=", 1) for word in text.split())
        return replace(cls(), **{name: _read(name, value) for name, value in given.items()})

    def delay(self, std: float) -> str:
        """Half of the workers are delayed by N(0, std) seconds for each gradient."""
        return f"fraction=0.5 normal:mean=0,std={show(std)}{'' if self.negative == 'clip' else ',negative=abs'}"

    def times(self, compute_s: float) -> str:
        """Virtual time, with the compute time that was measured."""
        compute = compute_s if self.compute_s is None else self.compute_s
        return f"compute={show(compute)} apply={show(self.apply_s)} gradient={show(self.gradient_s)}"

    def learning_rate(self, batch_size: int) -> float:
        """Of the mean loss: a loss that is summed over b samples has b times its gradient."""
        return self.rate * (batch_size if self.loss == "sum" else 1)

    def synchronous(self) -> str:
        """A round of all workers."""
        return f"synchronous:combine={self.combine}"

    def smooth_switch(self, every: float) -> str:
        """The paper's algorithm with a step function as threshold."""
        step = f"every={show(every)}"
        if (self.initial, self.increment, self.cap) != (1, 1, self.workers):
            shape = f"initial={show(self.initial)},increment={show(self.increment)},cap={self.cap}"
            step = f"threshold=(step:{step},{shape})"
        return f"smooth-switch:{step},{self.manner}"

    @property
    def manner(self) -> str:
        """The options that every threshold of Smooth Switch shares."""
        return f"combine={self.combine},hold={str(self.hold).lower()},count={self.count}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else show(value) if isinstance(value, float) else str(value)


def _read(name: str, value: str) -> Any:
    kind = type(getattr(Assumptions(), name))
    if kind is bool:
        return value == "true"
    return kind(value) if kind in (str, int) else float(value)
