"""What is wrong with a schedule is found, and only that."""

import pytest

from paceline.core.errors import InputError
from paceline.schedule import Action, Dependencies, Schedule, StageTimes, check, in_flight, simulate
from paceline.schedule.check import makes, needs
from tests.schedule.schedule_values import Scripted, Split, Streaming

SOUND = [
    (Scripted(["0F0 0F1 0B1 0B0"]), 2),
    (Scripted(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]), 2),
    (Split(["0F0 0I0 0W0", "1F0 1I0 1W0"]), 1),
    (Streaming(["0F0 0B0 0U0 0F1 0B1", "1F0 1B0 1F1 1B1 1U1"]), 2),
]


@pytest.mark.parametrize(("schedule", "m"), SOUND)
def test_sound(schedule: Scripted, m: int) -> None:
    assert check(schedule, len(schedule.lines), m) is None


BROKEN = [
    (Scripted(["0F0 0B0 0F1"]), 2, "worker 0 never does 0B1"),
    (Scripted(["0F0 0B0", "1F0"]), 1, "worker 1 never does 1B0"),
    (Scripted(["0F0 0B0 0F0"]), 1, "worker 0 does 0F0 more than once"),
    (Scripted(["0F0 0B0 0F1 0B1"]), 1, "worker 0 does 0F1 and should not"),
    (Scripted(["0F0 0B0 1F0", "1F0 1B0"]), 1, "worker 0 does 1F0 and should not"),
    (Scripted(["0F0 0B0 0U0"]), 1, "worker 0 does 0U0 and should not"),
    (Scripted(["0F0 0I0 0W0"]), 1, "worker 0 never does 0B0"),
    (Split(["0F0 0B0"]), 1, "worker 0 never does 0I0"),
    (Streaming(["0F0 0B0 0U0 0U0"]), 1, "worker 0 does 0U0 more than once"),
    (Scripted(["0B0 0F0"]), 1, "worker 0 with 0B0 for the activations of micro-batch 0 from part 0"),
    (Split(["0F0 0W0 0I0"]), 1, "worker 0 with 0W0 for the gradient of micro-batch 0 from part 0"),
    (Streaming(["0F0 0U0 0B0"]), 1, "worker 0 with 0U0 for the weights' gradient of micro-batch 0 from part 0"),
    (
        Scripted(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"]),
        2,
        "no worker can go on: worker 0 with 0B0 for the gradient of micro-batch 0 from part 1; "
        "worker 1 with 1F1 for the activations of micro-batch 1 from part 0 wait",
    ),
]


@pytest.mark.parametrize(("schedule", "m", "message"), BROKEN)
def test_broken(schedule: Scripted, m: int, message: str) -> None:
    found = check(schedule, len(schedule.lines), m)
    assert found is not None
    assert message in found


def test_left_out_micro_batches_are_not_missed_but_may_not_come() -> None:
    schedule = Scripted(["0F0 0B0"])
    assert check(schedule, 1, 2) == "worker 0 never does 0F1"
    assert check(schedule, 1, 2, left_out={1}) is None


def test_a_deadlock_is_refused_by_the_simulator_too() -> None:
    with pytest.raises(InputError, match="no worker can go on: worker 0 with 0B0"):
        simulate(Scripted(["0B0 0F0"]), StageTimes.equal(1), 1, 1)


def test_activations_are_held_until_both_halves_are_done() -> None:
    def held(schedule: Schedule) -> int:
        return in_flight(schedule, 0, 1, 9)

    assert held(Scripted(["0F0 0B0 0F1 0B1"])) == 1
    assert held(Split(["0F0 0I0 0F1 0W0 0I1 0F2 0F3"])) == 3
    assert held(Scripted(["0F0 2F0 0F1 2B0 0B0"])) == 3


@pytest.mark.parametrize(
    ("action", "needed", "made"),
    [
        ("0F2", [], ["activations"]),
        ("1F2", [("activations", 0, 2)], ["activations"]),
        ("2B1", [("activations", 2, 1)], ["gradient", "weights' gradient"]),
        ("1I1", [("activations", 1, 1), ("gradient", 2, 1)], ["gradient"]),
        ("1W1", [("gradient", 1, 1)], ["weights' gradient"]),
        ("1U1", [("weights' gradient", 1, 1)], []),
    ],
)
def test_needs_of_three_parts(action: str, needed: list[tuple[str, int, int]], made: list[str]) -> None:
    found = Action.parse(action)
    assert list(needs(found, Dependencies.chain(3))) == needed
    assert list(makes(found)) == [(what, found.stage, found.micro_batch) for what in made]
