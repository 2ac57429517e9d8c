"""Condition: a bound on a field of the history that ends a run, as a value and as text."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from paceline.core.errors import InputError
from paceline.core.records import RECORD_FIELDS, STATISTICS, Record

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_TEXT = re.compile(rf"\s*(\w+)\s*(>=|<=)\s*({_NUMBER})\s*")
# What is nearly one, of which the line to write is made.
_NEARLY = re.compile(rf"\s*(\w+)\s*(?:is\s+)?([<>=≥≤]+)\s*({_NUMBER})?.*")

# How a condition is written in Python; on the command line it is --until "…".
IN_PYTHON = "until='{}'"

_FIELDS = (*RECORD_FIELDS, *STATISTICS)
_FIELDS_TEXT = ", ".join([*_FIELDS, "test_<metric of the program>"])


@dataclass(frozen=True, slots=True)
class Condition:
    """A bound on a history field that ends the run once a record meets it: ``test_accuracy>=0.97``."""

    field: str
    above: bool
    bound: float

    @classmethod
    def parse(cls, text: str, *, form: str = IN_PYTHON) -> "Condition":
        """Return the value of a text such as ``test_accuracy>=0.97``.

        Args:
            text: a field, ``>=`` or ``<=``, and a number.
            form: how it is written, for the error.

        Raises:
            InputError: it is none, with the line to write.

        >>> Condition.parse("train_loss <= 0.1")
        Condition(field='train_loss', above=False, bound=0.1)
        >>> Condition.parse("accuracy>0.9", form='--until "{}"')
        Traceback (most recent call last):
        paceline.core.errors.InputError: --until "accuracy>0.9" is no condition, which is a field, >= or <=, and a ...
        """
        match = _TEXT.fullmatch(str(text))
        if match is None:
            given = form.format(text) if isinstance(text, str) else f"until={text!r}"
            raise InputError(
                f"{given} is no condition, which is a field, >= or <=, and a number; write "
                f"{form.format(_nearest(str(text)))}. Fields: {_FIELDS_TEXT}."
            )
        return cls(match[1], match[2] == ">=", float(match[3]))

    def refuse_unknown(self, *, form: str = IN_PYTHON) -> None:
        """Raise InputError, with the line to write, for a field that no record has, of whatever program.

        Args:
            form: how a condition is written, for the error.
        """
        if self.field not in _FIELDS and not self.field.startswith("test_"):
            text = f"{self.field}{'>=' if self.above else '<='}{self.bound:g}"
            raise InputError(
                f"{form.format(text)}: the history has no field {self.field!r}; write "
                f"{form.format(_nearest(text))}. Fields: {_FIELDS_TEXT}."
            )

    def met(self, record: Record) -> bool:
        """Return whether the record meets it; a field that was not scored does not."""
        value = record.row().get(self.field)
        return value is not None and (value >= self.bound if self.above else value <= self.bound)


def _nearest(text: str) -> str:
    """Return the condition that a text is likely to mean.

    >>> _nearest("accuracy>0.9"), _nearest("train_los = 0.1"), _nearest("soon")
    ('test_accuracy>=0.9', 'train_loss<=0.1', 'test_accuracy>=0.97')
    """
    match = _NEARLY.fullmatch(text)
    if match is None or match[3] is None:
        return "test_accuracy>=0.97"
    name, sign, bound = match.groups()
    known = next(iter(get_close_matches(name, _FIELDS, n=1, cutoff=0.5)), "test_accuracy")
    name = name if name.startswith("test_") else known
    falls = any(each in sign for each in "<≤") or (not any(each in sign for each in ">≥") and name.endswith("_loss"))
    return f"{name}{'<=' if falls else '>='}{bound}"
