"""Table of what runs where: feature × engine × policy × device -> the sentence to show for what does not run.

All combinations that Paceline refuses because two features exclude each other are in ``engine_rows.py`` and
``feature_rows.py``, once.
``train_options`` checks the table before anything starts, the planner checks each arrangement, and the README's table
is made from it. Other errors are raised where they belong: a field's own value by ``Strategy``, a schedule's sizes by
the schedule, a missing GPU or a wrong number of processes by the engine, which sees the machine, a model by its
capture.

To add an engine, list in its class the features that it supports (:data:`Feature`); to add a feature, add its rows.
"""

from paceline.aggregation import text_of
from paceline.core.errors import InputError
from paceline.support.case import ENGINE_FEATURES, Case, Feature
from paceline.support.engine_rows import ENGINE_ROWS
from paceline.support.feature_rows import FEATURE_ROWS
from paceline.support.row import Row

__all__ = ["ENGINE_FEATURES", "TABLE", "Case", "Feature", "Row", "first_row", "refuse"]

# All rows in the order in which they are checked: the first that applies is shown.
TABLE: tuple[Row, ...] = (*ENGINE_ROWS, *FEATURE_ROWS)


def refuse(case: Case) -> None:
    """Raise InputError with the sentence of the first row that applies."""
    row = first_row(case)
    if row is None:
        return
    s = case.strategy()
    # Engines of real time only: virtual time does not replace them.
    engines = [
        f"'{name}'"
        for name, features in ENGINE_FEATURES.items()
        if case.supports(row.feature, features) and name != "virtual"
    ]
    sentence = row.sentence.format(
        s=s,
        feature=row.feature,
        value=getattr(s, row.feature, None),
        engine=case.engine,
        engines=" or ".join(engines),
        policy=text_of(case.policy),
        clip_norm=case.clip_norm,
        on_death=case.on_death,
        copies=list(s.copies),
        most=max(s.copies),
        enough=2 * s.stage_count * max(s.copies),
    )
    raise InputError(sentence)


def first_row(case: Case) -> Row | None:
    """Return the first row that applies."""
    for row in TABLE:
        if row.applies(case):
            return row
    return None
