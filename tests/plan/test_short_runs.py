"""What workers hold beside what can be counted."""

import pytest

from paceline.core.records import WorkerFigures
from paceline.plan.base import Numerics
from paceline.plan.host.profile import Line, Unit
from paceline.plan.host.short_runs import held_beside, own_bytes
from tests.plan.test_probe import Branching, program

NUMERICS = Numerics(4, 4, 8)


def test_what_is_counted_of_a_worker() -> None:
    """With 100 elements: parameters, gradients, the moments of who has an optimizer, and what was saved."""
    figures = WorkerFigures(0, 0, 0, 3, 0.0, None, None, 1000, 400, peak_saved_bytes=70)
    assert own_bytes(figures, "stages", NUMERICS, 9.0) == 1600 + 70
    alone = WorkerFigures(0, 0, 0, 3, 0.0, None, None, 1000, 400)
    assert own_bytes(alone, "replicas", NUMERICS, 9.0) == 800 + 9


@pytest.mark.timeout(240.0)  # runs in processes that each import torch
def test_kinds_that_a_model_can_not_have_are_left_out() -> None:
    units = (Unit("the whole model", 12, Line(), Line()),)
    base = dict.fromkeys(("alone", "replicas", "stages", "shards"), 0)
    found = held_beside(program(Branching, width=3, classes=3), 2, base, NUMERICS, units, 8)
    assert set(found) == {"alone", "replicas"}
    assert min(found.values()) > 0  # a process holds far more than twelve elements
