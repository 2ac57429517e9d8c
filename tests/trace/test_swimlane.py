"""Swimlanes in characters, against small goldens."""

from collections.abc import Callable

import pytest

from paceline.core.errors import InputError
from paceline.trace.lanes import LOOKS
from paceline.trace.spans import ACTIONS, Span
from paceline.trace.text import swimlanes_text


def test_synchronous_rounds(synchronous: list[Span], golden: Callable[[str, str], None]) -> None:
    golden("synchronous.txt", swimlanes_text(synchronous, width=78))


def test_a_stretch_of_them(synchronous: list[Span], golden: Callable[[str, str], None]) -> None:
    golden("stretch.txt", swimlanes_text(synchronous, width=40, start_s=0.01, end_s=0.03))


def test_a_pipeline(pipeline: list[Span], golden: Callable[[str, str], None]) -> None:
    golden("pipeline.txt", swimlanes_text(pipeline, width=24))


def test_the_order_of_spans_does_not_matter(synchronous: list[Span]) -> None:
    assert swimlanes_text(reversed(synchronous)) == swimlanes_text(synchronous)


def test_a_character_shows_what_took_most_of_its_time() -> None:
    spans = [
        Span(0, 0, 0, "forward", 1, 0, 0, 130, 0),
        Span(0, 0, 0, "backward", 1, 0, 130, 151, 0),
        Span(0, 0, 0, "wait", 1, 0, 151, 1000, 0),
    ]
    assert "|F.........|" in swimlanes_text(spans, width=10)  # 100 .. 200 ns: forward 30, backward 21, wait 49


def test_every_action_has_its_own_letter() -> None:
    assert list(LOOKS) == list(ACTIONS)
    assert len({look.letter for look in LOOKS.values()} | {" "}) == len(ACTIONS) + 1


def test_no_spans() -> None:
    assert swimlanes_text([]) == "no spans\n"


def test_too_narrow_is_refused(synchronous: list[Span]) -> None:
    with pytest.raises(InputError, match="width=9 leaves no room for a lane; write width=10 or more"):
        swimlanes_text(synchronous, width=9)


def test_what_lies_within_a_pass_is_shown_and_the_pass_around_it() -> None:
    spans = [
        Span(0, 0, 0, "all_reduce", 1, 0, 300, 500, 8),
        Span(0, 0, 0, "forward", 1, 0, 0, 1000, 0),
        Span(0, 0, 0, "backward", 1, 0, 1000, 2000, 0),
        Span(0, 0, 0, "all_reduce", 1, 0, 1000, 1200, 8),
        Span(0, 0, 0, "all_reduce", 1, 0, 1800, 2000, 8),
    ]
    assert "|FFF==FFFFF==BBBBBB==|" in swimlanes_text(spans, width=20)
