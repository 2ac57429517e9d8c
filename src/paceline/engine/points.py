"""When a run is scored: evenly spaced points over its budget."""

from paceline.engine.base import Budget, BudgetUnit


class Points:
    """The evaluation points of a budget, from 0 on, in its unit."""

    def __init__(self, budget: Budget) -> None:
        self._every, self._passed = budget.evaluate_every, 0

    @property
    def next(self) -> float:
        """Where the next point lies."""
        return self._passed * self._every

    def reached(self, progress: float) -> bool:
        """Whether the next point lies at or before ``progress`` (up to rounding); then all up to there are passed."""
        reach = progress * (1 + 1e-12)
        if self.next > reach:
            return False
        self._passed = int(reach / self._every) + 1
        return True

    def step_over(self) -> float:
        """Pass the next point, and say where it lay."""
        at = self.next
        self._passed += 1
        return at


class Meter:
    """How much of a budget is spent, in its unit, from what has happened.

    Args:
        unit: of the budget.
        per_unit: micro-steps of all replicas in one step, or samples in one epoch; not used for seconds.
    """

    def __init__(self, unit: BudgetUnit, per_unit: float) -> None:
        self._unit, self._per_unit = unit, per_unit

    def spent(self, time_s: float, micro_steps: int, samples: int) -> float:
        """Seconds, steps or epochs, whichever the budget counts."""
        if self._unit == "seconds":
            return time_s
        return (micro_steps if self._unit == "steps" else samples) / self._per_unit
