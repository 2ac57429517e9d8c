"""Every schedule that can be asked for, with sizes that it takes; and schedules that say what they are told to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.schedule import Action, Schedule, names, parse

TEXTS = [*names(), "interleaved:chunks=3"]
"""A registered one joins by its name; options that change much are added by hand."""

FLUSHING = [text for text in TEXTS if parse(text).flushes]
STREAMING = [text for text in TEXTS if not parse(text).flushes]


@st.composite
def cases(draw: st.DrawFn, text: str, workers: int = 16, micro_batches: int = 64) -> tuple[Schedule, int, int]:
    """The schedule, p and m; m is rounded up to a multiple of p where it must be one."""
    schedule = parse(text)
    p, m = draw(st.integers(1, workers)), draw(st.integers(1, micro_batches))
    try:
        schedule.refuse(p, m)
    except InputError:
        m = -(-m // p) * p
    return schedule.resolved(m), p, m


@dataclass(frozen=True)
class Scripted(Schedule):
    """Does what is written: a line a worker, actions apart by blanks."""

    lines: Sequence[str]

    def refuse(self, workers: int, micro_batches: int) -> None:
        assert workers == len(self.lines)

    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        return map(Action.parse, self.lines[worker].split())


class Split(Scripted):
    """With a backward in two halves."""

    splits_backward = True


class Streaming(Scripted):
    """With updates."""

    flushes = False
