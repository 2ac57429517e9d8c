"""How a gradient is made smaller on its way through an all-reduce: the contract, and who fulfils it.

::

    rank 0   gradient ---- compress ----+                    +---- decompress ---- Σ gradient
                              |         |                    |
                         what is lost   +--- few bytes, all --+    the same bits on every rank
                              |         |    ranks to all     |
    rank 1   gradient ---- compress ----+                    +---- decompress ---- Σ gradient

What is lost may be kept and added to the next gradient (error feedback): then nothing is lost, it only comes later.

A compression is a frozen value; all that changes from step to step is the state that it makes and is handed back::

    compression = parse("powersgd:rank=2")
    state = compression.start(shapes, torch.float32)
    for each step:
        sent_bytes = compression.all_reduce(state, gradient, group)

It works over any backend that has ``all_reduce`` and ``all_gather``. Sums of the same bits are only as equal as the
arithmetic: ranks need processors of one kind, one build of torch and equally many threads, as for the update itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import compression
from paceline.compression import Method
from paceline.core.errors import InputError
from paceline.core.text_form import text_of

Shape: TypeAlias = tuple[int, ...]

S = TypeVar("S")
C = TypeVar("C", bound="type[Compression[Any]]")


class Compression(ABC, Generic[S]):
    """One way to sum gradients over ranks with fewer bytes. Subclasses are frozen dataclasses of one ``method``."""

    method: Method
    """What a Strategy says of it."""

    @abstractmethod
    def start(self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device | str = "cpu") -> S:
        """The state of one gradient before its first step: the same on every rank, and good to be pickled.

        Args:
            shapes: of the parameters, in the order in which they lie in the gradient.
            dtype: float32 or float64.
            device: where the gradients will lie.
        """

    @abstractmethod
    def all_reduce(self, state: S, gradient: Tensor, group: dist.ProcessGroup) -> int:
        """Replace ``gradient`` by its sum over the ranks of ``group``, the same bits on each; move ``state`` on.

        If a rank's gradient is not finite, the sum is not finite on any rank, and what earlier steps have left in the
        state stays as it was: an engine may skip the step and go on.

        Args:
            state: of :meth:`start`; its tensors change.
            gradient: this rank's share, one contiguous vector, the parameters one after another.
            group: every rank of it makes the same call.

        Returns:
            The bytes that this rank has sent: :func:`ring_bytes` for all-reduces, :func:`gather_bytes` for all-gathers.
        """

    def __str__(self) -> str:
        return text_of(self.method)


_CARRIERS: dict[type[Method], Callable[[Any], Compression[Any]]] = {}


def carries(method: type[Method]) -> Callable[[C], C]:
    """Say that a class carries out a method."""

    def decorate(cls: C) -> C:
        _CARRIERS[method] = cls
        return cls

    return decorate


def carriers() -> dict[type[Method], Callable[[Any], Compression[Any]]]:
    """Every method that is carried out, and by what."""
    return dict(_CARRIERS)


def parse(text: str) -> Compression[Any]:
    """The compression that a Strategy's text says.

    Raises:
        InputError: an unknown one, an option out of its range, or a method that nothing carries out.

    >>> str(parse("powersgd:rank=2"))
    'powersgd:rank=2'
    """
    method = compression.parse(text)
    if type(method) not in _CARRIERS:
        raise InputError(
            f"compression={text} has a text form and nothing that carries it out; write @carries("
            f"{type(method).__name__}) over a Compression, and import its file."
        )
    return _CARRIERS[type(method)](method)


def ring_bytes(tensor: Tensor, ranks: int) -> int:
    """2·(P−1)/P·n·b: what a rank sends in a ring all-reduce of n elements of b bytes; rounded up.

    Each of the P slices of the ring leaves a rank P-1 times in all: once for each sum but its own, once for each copy.
    Backends may take other ways; this is the least that any of them can send per rank.

    >>> ring_bytes(torch.zeros(1000), 4)
    6000
    """
    return -(-2 * (ranks - 1) * tensor.nbytes // ranks)


def gather_bytes(tensor: Tensor, ranks: int) -> int:
    """(P−1)·k·b: what a rank sends in an all-gather, in which each gives k elements of b bytes.

    >>> gather_bytes(torch.zeros(1000), 4)
    12000
    """
    return (ranks - 1) * tensor.nbytes
