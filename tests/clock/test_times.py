"""Virtual times read back, and each stream is a function of seed and replica."""

from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.clock import Times, parse
from paceline.core.errors import InputError

RANDOM = Times.parse(" ".join(f"{name}=exponential:mean=1" for name in ("compute", "transfer", "apply", "gradient")))
texts = st.sampled_from(["0", "0.5", "normal:mean=1,std=0.1", "pareto:scale=1,shape=2"])


def first(stream: Iterator[float], count: int = 300) -> tuple[float, ...]:
    return tuple(islice(stream, count))


@given(st.one_of(texts, st.just("measured")), texts, texts, texts)
def test_parse_undoes_print(compute: str, transfer: str, apply: str, gradient: str) -> None:
    text = f"compute={compute} transfer={transfer} apply={apply} gradient={gradient}"
    assert str(Times.parse(text)) == text
    assert Times.parse(" ".join(reversed(text.split()))) == Times.parse(text)


def test_defaults() -> None:
    assert str(Times()) == "compute=0.01 transfer=0 apply=0 gradient=0"
    assert Times.parse("apply=2") == Times(apply=parse("2"))


def test_streams_are_apart_and_repeat() -> None:
    streams = [first(RANDOM.stream("compute", 0, r)) for r in range(3)]
    streams += [first(RANDOM.stream("transfer", 0, r)) for r in range(3)]
    streams += [first(RANDOM.stream("apply", 0)), first(RANDOM.stream("gradient", 0))]
    streams += [first(RANDOM.stream("compute", 1, 0)), first(RANDOM.stream("apply", 1))]
    assert len(set(streams)) == len(streams)
    assert first(RANDOM.stream("compute", 0, 2)) == streams[2]
    assert first(RANDOM.stream("transfer", 0, 1)) == streams[4]


def test_constants_reach_their_streams() -> None:
    times = Times.parse("compute=1 transfer=2 apply=3 gradient=4")
    streams = [
        times.stream("compute", 0, 0),
        times.stream("transfer", 0, 0),
        times.stream("apply", 0),
        times.stream("gradient", 0),
    ]
    assert [first(stream, 2) for stream in streams] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_measured_computing_has_no_stream() -> None:
    with pytest.raises(AssertionError, match="compute is measured"):
        Times.parse("compute=measured").stream("compute", 0, 0)


def test_all_of_it_is_measured_in_a_word() -> None:
    times = Times.parse("measured")
    assert str(times) == "compute=measured transfer=measured apply=measured gradient=0"
    assert Times.parse(str(times)) == times
    assert [each.all_measured for each in (times, Times(), Times.parse("compute=measured"))] == [True, False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute", r"'compute' is not key=value; write 'compute=0.01 transfer=0"),
        ("compute=", "'compute=' is not key=value"),
        ("comput=1", "unknown time 'comput'; did you mean 'compute'"),
        ("compute=-1", "compute=-1, but it must be 0 or more; write compute=0"),
        (" ", "times=' ' says nothing; write 'compute="),
        ("apply=1 apply=2", "apply is given twice, 1 and 2"),
        ("transfer=measured", r"transfer and apply are measured together with compute; write times='measured'"),
        ("compute=measured apply=measured", r"transfer and apply are measured together with compute"),
        ("gradient=measured", r"it is measured with apply; write times='measured'"),
        ("compute=mesured", "compute=mesured: unknown distribution"),
        ("gradient=normal:mean=1", "gradient=normal:mean=1: normal has no default for std"),
    ],
)
def test_bad_times_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Times.parse(text)
