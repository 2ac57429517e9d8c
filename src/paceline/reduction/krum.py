"""The Δs that are nearest to others."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import final

from paceline.core.errors import InputError, check_int
from paceline.core.registry import register
from paceline.core.text_form import text_of
from paceline.reduction.base import Reducer, Reduction, Tensor


@final
@register("krum")
@dataclass(frozen=True)
class Krum(Reducer):
    """Mean of the ``best`` Δs by the sum of their squared distances from their n - faulty - 2 nearest.

    One of them is Krum, several are Multi-Krum (Blanchard et al. 2017, 1703.02757), which holds against ``faulty``
    replicas of n >= 2·faulty + 3. Of fewer Δs at least the nearest counts. Weights are of no effect.

    Args:
        faulty: replicas that may send anything.
        best: Δs of which the mean is taken.
    """

    faulty: int = 1
    best: int = 1

    def __post_init__(self) -> None:
        check_int("krum:faulty", self.faulty, least=0)
        check_int("krum:best", self.best, least=1)

    def check(self, deltas: int) -> None:
        if deltas < 2 * self.faulty + 3 or self.best > deltas - self.faulty:
            faulty = min(self.faulty, (deltas - 3) // 2)
            fewer = f"krum:faulty={faulty},best={min(self.best, deltas - faulty)}, or " if faulty >= 0 else ""
            raise InputError(
                f"{text_of(self)} of {deltas} Δs: against f faulty ones Krum needs 2·f + 3, and takes at most all "
                f"others; write {fewer}by=median"
            )

    def statistics(self, deltas: Sequence[Tensor]) -> list[float]:
        """Return the squared distance of each pair."""
        return [float((one - other).double().square().sum()) for one, other in combinations(deltas, 2)]

    def combine(self, given: Reduction, out: Tensor) -> None:
        chosen = self.chosen(len(given.deltas), given.statistics)
        out.copy_(given.deltas[chosen[0]])
        for index in chosen[1:]:
            out.add_(given.deltas[index])
        out.div_(len(chosen))

    def chosen(self, count: int, squares: Sequence[float]) -> list[int]:
        """Return the numbers of the Δs that are taken, in order; of equal scores the first.

        >>> Krum(faulty=0).chosen(3, [1.0, 25.0, 16.0])  # at 0, 1 and 5
        [0]
        """
        distances = [[0.0] * count for _ in range(count)]
        for (i, j), square in zip(combinations(range(count), 2), squares, strict=True):
            distances[i][j] = distances[j][i] = square
        nearest = max(1, count - self.faulty - 2)
        others = [sorted(row[:i] + row[i + 1 :]) for i, row in enumerate(distances)]
        scores = [sum(each[:nearest]) for each in others]
        return sorted(sorted(range(count), key=lambda i: scores[i])[: self.best])
