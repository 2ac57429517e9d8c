"""End training once a figure improves no more."""

import math
from typing import Literal, final

from paceline.callbacks.base import Callback, RunHandle
from paceline.core.errors import InputError, check_choice, check_int, check_number, unknown
from paceline.core.records import Record


@final
class EarlyStopping(Callback):
    """Ends training after ``patience`` records in a row without an improvement.

    With patience=2::

        test_loss   0.9   0.7   0.8   0.7   (the run ends)
                    best  best   1     2

    Args:
        field: field of a history record, ``test_loss``, ``test_accuracy`` or ``test_<name>`` of a metric, say; a run
            whose records can't have it is refused. Records without it count for nothing, and a value that is not
            finite is no improvement.
        patience: how many records may bring none.
        min_delta: by how much a value must be better than the best so far, in the field's unit.
        mode: ``min`` or ``max``: whether less or more is better; None: as the field's name says, ``…loss`` or
            ``…accuracy``.

    Raises:
        InputError: an option can't be that, or ``mode`` is needed.

    >>> EarlyStopping("test_bleu")
    Traceback (most recent call last):
    paceline.core.errors.InputError: EarlyStopping(field='test_bleu') does not say what is better; write mode='min' or
    mode='max'
    """

    def __init__(
        self,
        field: str = "test_loss",
        patience: int = 5,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        check_int("patience", patience, least=1)
        check_number("min_delta", min_delta, "of at least 0", lambda value: value >= 0, instead=0.0)
        if mode is None and not field.endswith(("loss", "accuracy")):
            raise InputError(
                f"EarlyStopping(field={field!r}) does not say what is better; write mode='min' or mode='max'"
            )
        mode = mode or ("min" if field.endswith("loss") else "max")
        check_choice("mode", mode, ("min", "max"))
        self.field, self.patience, self.min_delta, self.mode = field, patience, min_delta, mode
        self._best, self._since = math.inf, 0

    def on_start(self, run: RunHandle) -> None:
        """Begin with the records of a run that is resumed."""
        self._best, self._since = math.inf, 0
        for record in run.history:
            self._note(record)

    def on_record(self, record: Record, run: RunHandle) -> None:
        """End training if this is one record too many without an improvement."""
        self._note(record)
        if self._since >= self.patience:
            best = self._best if self.mode == "min" else -self._best
            run.stop(f"{self.field} has not improved on {best:g} for {self._since} records")

    def _note(self, record: Record) -> None:
        row = record.row()
        if self.field not in row:
            raise unknown("history field in EarlyStopping", self.field, row)
        value = row[self.field]
        if value is None:
            return
        cost = value if self.mode == "min" else -value
        if math.isfinite(cost) and cost < self._best - self.min_delta:
            self._best, self._since = cost, 0
        else:
            self._since += 1
