"""Delays are the same whoever asks for them, when and where."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.clock import Delay, parse
from paceline.core.errors import InputError

PAPER = Delay.parse("fraction=0.5 normal:mean=0,std=0.25")


@given(st.floats(0, 1), st.sampled_from(["0.1", "normal:mean=0,std=0.25,negative=abs", "exponential:mean=2"]))
def test_parse_undoes_print(fraction: float, text: str) -> None:
    delay = Delay(parse(text), fraction)
    assert Delay.parse(str(delay)) == delay
    assert Delay.parse(" ".join(reversed(str(delay).split()))) == delay


@given(st.floats(0, 1), st.integers(1, 50), st.integers(0, 9))
def test_a_fixed_fraction_is_slowed(fraction: float, replicas: int, seed: int) -> None:
    delay = Delay(parse("0.1"), fraction)
    slowed = delay.slowed(replicas, seed)
    assert len(slowed) == round(fraction * replicas)
    assert slowed <= set(range(replicas))
    assert slowed == {r for r in range(replicas) if delay.stream(r, replicas, seed) is not None}


def test_who_is_slowed_depends_on_the_seed() -> None:
    assert len({PAPER.slowed(25, seed) for seed in range(20)}) == 20
    assert PAPER.slowed(25, 3) == PAPER.slowed(25, 3)


def test_draws_depend_on_seed_replica_and_count_alone() -> None:
    everyone = Delay(PAPER.distribution, 1.0)

    def first(replica: int, replicas: int, seed: int) -> list[float]:
        stream = everyone.stream(replica, replicas, seed)
        assert stream is not None
        return list(islice(stream, 600))

    streams = [first(replica, 8, 7) for replica in range(8)]
    assert len({tuple(stream) for stream in streams}) == 8
    assert first(3, 8, 7) == streams[3] == first(3, 100, 7)
    assert first(3, 8, 8) != streams[3]
    for replica in PAPER.slowed(8, 7):
        stream = PAPER.stream(replica, 8, 7)
        assert stream is not None
        assert list(islice(stream, 600)) == streams[replica]


def test_half_of_the_replicas_unless_told() -> None:
    assert Delay.parse("0.1") == Delay(parse("0.1"), 0.5)
    assert str(Delay.parse("normal:mean=0,std=0.25")) == str(PAPER) == "fraction=0.5 normal:mean=0,std=0.25"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be one distribution"),
        ("fraction=0.5", "must be one distribution and at most one fraction; write 'fraction=0.5 normal:"),
        ("0.1 0.2", "must be one distribution"),
        ("fraction=0.5 fraction=0.5 0.1", "at most one fraction"),
        ("fraction=1.5 0.1", r"fraction=1.5 is outside 0 to 1; write fraction=0.5"),
        ("fraction=-0.1 0.1", r"fraction=-0.1 is outside"),
        ("fraction=nan 0.1", "fraction=nan is not finite"),
        ("fraction=half 0.1", "fraction='half' is no number"),
        ("fraktion=0.5 0.1", "must be one distribution"),
        ("fraction=0.5 norml:mean=0,std=1", "did you mean 'normal'"),
    ],
)
def test_bad_delays_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Delay.parse(text)
