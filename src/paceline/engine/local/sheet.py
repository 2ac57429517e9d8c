"""The figures of the workers of a run whose replicas have several, where they outlive them."""

import struct

from paceline.engine.figures import STEP_TIMES, Figures

_FIGURES = struct.Struct("=qqqq")
_EACH = 5 + STEP_TIMES


class Sheet:
    """A view of words of shared memory.

    Args:
        words: as many as :meth:`size` says, zeros at first.
    """

    def __init__(self, words: memoryview) -> None:
        self._bytes, self._words, self._reals = words, words.cast("q"), words.cast("d")

    @staticmethod
    def size(workers: int) -> int:
        """Words of a sheet."""
        return workers * _EACH

    def measure(self, worker: int, figures: Figures, step_time_s: float | None = None) -> None:
        """Write a worker's figures, and the time of one more step."""
        if step_time_s is not None:
            self._reals[worker * _EACH + 5 + figures.steps % STEP_TIMES] = step_time_s
        _FIGURES.pack_into(self._bytes, 8 * worker * _EACH, *figures)

    def figures(self, worker: int) -> Figures:
        """A worker's figures."""
        return Figures._make(_FIGURES.unpack_from(self._bytes, 8 * worker * _EACH))

    def step_times(self, worker: int) -> list[float]:
        """A worker's latest step times, in seconds, in no order."""
        first = worker * _EACH + 5
        return [t for t in self._reals[first : first + STEP_TIMES].tolist() if t > 0]

    def hold(self, worker: int, nbytes: int) -> None:
        """Write how many bytes of parameters a worker has."""
        self._words[worker * _EACH + 4] = nbytes

    def held_bytes(self, worker: int) -> int:
        """How many bytes of parameters a worker has."""
        return self._words[worker * _EACH + 4]
