"""How values go from one worker of a pipeline to another: the contract that engines fulfil."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


class Arrival(ABC):
    """A tensor that is expected."""

    @abstractmethod
    def take(self) -> Tensor:
        """The tensor, once it is there."""


class Wire(ABC):
    """One worker's.

    Two workers send and expect in one order that both know, since each knows the other's schedule: so messages need no
    names.
    """

    @abstractmethod
    def send(self, tensor: Tensor, to: int, what: str) -> None:
        """Begin to send; the tensor must stay as it is until :meth:`settle`.

        Args:
            tensor: contiguous.
            to: a worker of the same replica.
            what: in words that follow "waited for".
        """

    @abstractmethod
    def expect(self, shape: Sequence[int], dtype: torch.dtype, source: int, what: str) -> Arrival:
        """Begin to receive."""

    @abstractmethod
    def settle(self, but: int = 0) -> None:
        """Wait until all that was sent has gone, but the newest so many."""


@final
class Alone(Wire):
    """That of a pipeline of one worker, who has nobody to send to."""

    def send(self, tensor: Tensor, to: int, what: str) -> None:
        del tensor
        raise AssertionError(f"{what} is for worker {to}, and there is but one")

    def expect(self, shape: Sequence[int], dtype: torch.dtype, source: int, what: str) -> Arrival:
        del shape, dtype
        raise AssertionError(f"{what} is from worker {source}, and there is but one")

    def settle(self, but: int = 0) -> None:
        """Nothing was sent."""
