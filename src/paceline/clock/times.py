"""How long the parts of a step take in virtual time."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, final

import numpy as np

from paceline.clock.base import Distribution
from paceline.clock.distributions import Constant, parse
from paceline.clock.text import pairs
from paceline.core.errors import InputError, unknown
from paceline.core.types import ReplicaId, Seconds

Measured: TypeAlias = Literal["measured"]
"""The time that computing the gradient really took."""

_DRAWS = int.from_bytes(b"times")
_COMPUTE, _TRANSFER, _APPLY, _GRADIENT = range(4)
_STEP, _NOTHING = Constant(0.01), Constant(0.0)
_EXAMPLE = "compute=0.01 transfer=0 apply=0 gradient=0"


@final
@dataclass(frozen=True)
class Times:
    """Seconds of virtual time; an update of K gradients occupies the server for ``apply + K * gradient``.

    ::

        replica   |-- compute --|- delay -|- transfer -|                        |- transfer -|-- compute --
        server                                         |- apply + K * gradient -|

    The k-th draw of each stream depends on the seed, the replica and k alone.

    Args:
        compute: of one Δ; ``"measured"`` takes what it really took, and the run is then not reproducible.
        transfer: of one message, replica to server or back; drawn for each.
        apply: of one update of A.
        gradient: of each gradient that goes into an update.

    Written as ``measured`` alone, compute, transfer and apply are all measured, piece by piece, with as many processes
    at work as there will be workers: what comes out is what a step will take on this host.

    Raises:
        InputError: transfer or apply is measured, but not all three are.

    >>> times = Times.parse("transfer=exponential:mean=0.001")
    >>> str(times)
    'compute=0.01 transfer=exponential:mean=0.001 apply=0 gradient=0'
    >>> next(times.apply_stream(seed=0))
    0.0
    """

    compute: Distribution | Measured = _STEP
    transfer: Distribution | Measured = _NOTHING
    apply: Distribution | Measured = _NOTHING
    gradient: Distribution = _NOTHING

    def __post_init__(self) -> None:
        if "measured" in (self.transfer, self.apply) and not self.all_measured:
            raise InputError(
                f"times={str(self)!r}: transfer and apply are measured together with compute; write times='measured'"
            )

    @property
    def all_measured(self) -> bool:
        """Whether a step is put together of measured pieces."""
        return self.compute == self.transfer == self.apply == "measured"

    @classmethod
    def parse(cls, text: str) -> "Times":
        """The times that ``text`` describes; what it leaves out stays at its default.

        Raises:
            InputError: an unknown name (with the nearest known one), a negative or unreadable value, or ``measured``
                where that can't be.
        """
        if text.strip() == "measured":
            return cls("measured", "measured", "measured")
        given = pairs(text.split(), "times", repr(_EXAMPLE))
        for key in given:
            if key not in (known := [each.name for each in fields(cls)]):
                raise unknown("time", key, known)
        return cls(**{key: _value(key, value) for key, value in given.items()})  # type: ignore[arg-type]

    def __str__(self) -> str:
        return " ".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))

    def compute_stream(self, replica: ReplicaId, seed: int) -> Iterator[Seconds] | None:
        """How long a replica's Δs take to compute; None where that is measured."""
        if isinstance(self.compute, str):
            return None
        return self.compute.stream(_rng(seed, _COMPUTE, replica))

    def transfer_stream(self, replica: ReplicaId, seed: int) -> Iterator[Seconds]:
        """How long the messages to and from a replica take, where that is not measured."""
        assert not isinstance(self.transfer, str), "it is measured"
        return self.transfer.stream(_rng(seed, _TRANSFER, replica))

    def apply_stream(self, seed: int) -> Iterator[Seconds]:
        """How long the server takes for each update, whatever it is made of, where that is not measured."""
        assert not isinstance(self.apply, str), "it is measured"
        return self.apply.stream(_rng(seed, _APPLY))

    def gradient_stream(self, seed: int) -> Iterator[Seconds]:
        """How long the server takes for each gradient of an update."""
        return self.gradient.stream(_rng(seed, _GRADIENT))


def _rng(*key: int) -> np.random.Generator:
    seed, *rest = key
    return np.random.default_rng([seed, _DRAWS, *rest])


def _value(key: str, value: str) -> Distribution | Measured:
    if value != "measured":
        try:
            return parse(value)
        except InputError as error:
            raise InputError(f"{key}={value}: {error}") from error
    if key == "gradient":
        raise InputError("gradient=measured, but it is measured with apply; write times='measured'")
    return "measured"
