"""Schedules and their actions as text."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.registry import family_of, register
from paceline.schedule import Action, Schedule, canonical, names, parse
from paceline.schedule.base import LETTERS
from paceline.schedule.interleaved import Interleaved
from paceline.strategy import Strategy


@given(st.builds(Action, st.integers(0, 10**6), st.sampled_from(sorted(LETTERS)), st.integers(0, 10**6)))
def test_parse_undoes_print(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "2F-1", "2F0 ", "-2F0"])
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(InputError, match="is no action; write a stage, one of F, B, I, W, U, a micro-batch: 2F0"):
        Action.parse(text)


def test_names() -> None:
    assert names() == ("1f1b", "gpipe", "interleaved", "pipedream", "pipedream-2bw", "sequential", "zero-bubble")


@pytest.mark.parametrize("name", names())
def test_names_are_canonical(name: str) -> None:
    assert canonical(name) == name


def test_options() -> None:
    assert parse("interleaved") == Interleaved(chunks=2)
    assert parse("interleaved:chunks=4") == Interleaved(chunks=4)
    assert canonical("interleaved:chunks=2") == "interleaved"
    assert canonical("interleaved:chunks=4") == "interleaved:chunks=4"


WRONG = [
    ("1b1f", "unknown schedule '1b1f'; did you mean '1f1b'"),
    ("interleaved:chunks=1", "interleaved:chunks=1, but it must be a whole number of at least 2; write"),
    ("interleaved:chunk=2", "unknown option of interleaved 'chunk'; did you mean 'chunks'"),
    ("gpipe:chunks=2", "unknown option of gpipe 'chunks'"),
    ("pipedream-2bw:every=2", "unknown option of pipedream-2bw 'every'"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_wrong_text(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(text)


@pytest.mark.parametrize("value", [None, 3, Interleaved()])
def test_what_is_no_text(value: object) -> None:
    with pytest.raises(InputError, match="is no text; write schedule='1f1b', or schedule='interleaved:chunks=2'"):
        canonical(value)


@dataclass(frozen=True)
class Backwards(Schedule):
    """A schedule as a user writes it: one class in one file."""

    gap: int = 1

    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        for i in reversed(range(micro_batches)):
            yield from (Action(worker, "forward", i), Action(worker, "backward", i))


@pytest.fixture
def backwards() -> Iterator[None]:
    register("backwards")(Backwards)
    yield
    kind = family_of(Schedule)
    assert kind is not None
    del kind.entries["backwards"]


@pytest.mark.usefixtures("backwards")
def test_a_schedule_of_ones_own() -> None:
    assert parse("backwards:gap=2") == Backwards(2)
    assert Strategy(schedule="backwards:gap=1").schedule == "backwards"
    assert Strategy.parse("schedule=backwards:gap=3").schedule == "backwards:gap=3"
