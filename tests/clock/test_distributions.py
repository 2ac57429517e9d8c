"""Text forms read back, draws have the mean they promise, and none is negative."""

import math
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.clock.distributions import (
    Constant,
    Distribution,
    Exponential,
    Lognormal,
    Normal,
    Pareto,
    ShiftedExponential,
    Trace,
    parse,
)
from paceline.core.errors import InputError
from paceline.core.registry import registered

positive = st.floats(1e-6, 1e6)
seconds = st.floats(0, 1e6)
distributions: st.SearchStrategy[Distribution] = st.one_of(
    st.builds(Constant, seconds),
    st.builds(Normal, st.floats(-1e6, 1e6), seconds, st.sampled_from(["clip", "abs"])),
    st.builds(Exponential, positive),
    st.builds(ShiftedExponential, seconds, positive),
    st.builds(Pareto, positive, st.floats(0.1, 1e6)),
    st.builds(Lognormal, positive, st.floats(0, 10)),
)

TEXTS = [
    "0.02",
    "normal:mean=0,std=0.25",
    "normal:mean=0.1,std=0.25,negative=abs",
    "normal:mean=-0.1,std=0.25",
    "normal:mean=-0.1,std=0",
    "normal:mean=-0.1,std=0,negative=abs",
    "exponential:mean=0.3",
    "shifted-exponential:shift=0.1,mean=0.2",
    "pareto:scale=0.1,shape=4",
    "lognormal:median=0.1,sigma=0.5",
    "trace:path=TRACE",
]


def draws(distribution: Distribution, count: int, seed: int = 0) -> list[float]:
    return list(islice(distribution.stream(np.random.default_rng(seed)), count))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "seconds.txt"
    path.write_text("0.1\n0.2\n\n0.6\n")
    return path


@given(distributions)
def test_parse_undoes_print(distribution: Distribution) -> None:
    assert parse(str(distribution)) == distribution


@given(distributions, st.integers(0, 100))
def test_draws_are_finite_and_never_negative(distribution: Distribution, seed: int) -> None:
    drawn = draws(distribution, 300, seed)
    assert all(type(value) is float and 0 <= value < math.inf for value in drawn)
    assert drawn == draws(distribution, 300, seed)


@pytest.mark.parametrize("text", TEXTS)
def test_draws_have_the_mean_they_promise(text: str, trace: Path) -> None:
    distribution = parse(text.replace("TRACE", str(trace)))
    assert str(distribution) == text.replace("TRACE", str(trace))
    assert np.mean(draws(distribution, 60_000)) == pytest.approx(distribution.mean_s, rel=0.02)


def test_every_kind_is_tested() -> None:
    assert {text.partition(":")[0] for text in TEXTS if ":" in text} | {"constant"} == set(registered(Distribution))


def test_rules_below_zero() -> None:
    clipped, folded = (draws(Normal(0, 1, rule), 2000) for rule in ("clip", "abs"))
    assert sum(value == 0 for value in clipped) == pytest.approx(1000, abs=100)
    assert all(a == b for a, b in zip(clipped, folded, strict=True) if a > 0)
    assert min(folded) > 0


def test_heavy_tails_have_no_mean() -> None:
    assert parse("pareto:scale=1,shape=1").mean_s == math.inf


def test_constants() -> None:
    assert parse("constant:value=0.5") == parse(" 0.5 ") == Constant(0.5)
    assert draws(Constant(2), 3) == [2.0, 2.0, 2.0]


def test_a_trace_goes_in_a_circle_from_a_seeded_place(trace: Path) -> None:
    distribution = parse(f"trace:path={trace}")
    circles = {tuple(draws(distribution, 6, seed)) for seed in range(30)}
    assert circles == {(0.1, 0.2, 0.6) * 2, (0.2, 0.6, 0.1) * 2, (0.6, 0.1, 0.2) * 2}


def test_a_trace_is_read_once_and_travels(trace: Path) -> None:
    distribution = parse(f"trace:path={trace}")
    trace.unlink()
    assert draws(pickle.loads(pickle.dumps(distribution)), 3) == draws(distribution, 3)


def test_a_column_of_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text('step,"time, all",seconds\n0,9,0.5\n1,9,0.25\n')
    distribution = parse(f"trace:path={path},column=seconds")
    assert isinstance(distribution, Trace)
    assert distribution.values == (0.5, 0.25)
    assert parse(str(distribution)) == distribution


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        ("0.1\nfast\n", "", r"seconds.txt:2='fast' is no number"),
        ("0.1\n-2\n", "", r"seconds.txt:2=-2, but it must be 0 or more"),
        ("inf\n", "", r"seconds.txt:1=inf is not finite"),
        ("\n \n", "", "holds no values; write one number of seconds a line"),
        ("a,b\n1,2\n", "c", "no column 'c'; write column= and one of: a, b"),
        ("a,b\n1,2\n1,x\n", "b", r"seconds.txt:3='x'"),
    ],
)
def test_bad_traces_are_refused_by_line(tmp_path: Path, content: str, column: str, message: str) -> None:
    path = tmp_path / "seconds.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        Trace(str(path), column)


def test_a_missing_trace_is_refused() -> None:
    with pytest.raises(InputError, match=r"trace nowhere\.txt can't be read.*No such file"):
        parse("trace:path=nowhere.txt")


@pytest.mark.parametrize("path", ["a b.txt", "a,b.txt", ""])
def test_a_path_that_the_text_form_can_not_hold_is_refused(path: str) -> None:
    with pytest.raises(InputError, match="neither a comma nor a blank"):
        Trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("normle:mean=0,std=1", "unknown distribution 'normle'; did you mean 'normal'"),
        ("uniform", "unknown distribution 'uniform'"),
        ("nan", "unknown distribution 'nan'"),
        ("", "an empty text is no distribution"),
        ("-1", "value=-1, but it must be 0 or more; write value=0"),
        ("1s", "value='1s' is no number"),
        ("normal", "normal has no default for mean; write normal:mean="),
        ("normal:mean=0", "normal has no default for std"),
        ("normal:mean=0,sdt=1", "unknown option of normal 'sdt'; did you mean 'std'"),
        ("normal:mean=0,std=-1", "std=-1, but it must be 0 or more"),
        ("normal:mean=nan,std=1", "mean=nan is not finite"),
        ("normal:mean=0,std=x", "normal:std=x, but it must be a number"),
        ("normal:mean=0,std=1,negative=clop", "did you mean 'clip'"),
        ("normal:mean=0,,std=1", "'' is no option of normal"),
        ("normal:mean=0,mean=1,std=1", "says mean twice; write mean=1 once"),
        ("exponential:mean=0", "mean=0, but it must be above 0"),
        ("shifted-exponential:shift=-1,mean=1", "shift=-1, but it must be 0 or more"),
        ("pareto:scale=0,shape=1", "scale=0, but it must be above 0"),
        ("pareto:scale=1,shape=0", "shape=0, but it must be 0.1 or more"),
        ("lognormal:median=0,sigma=1", "median=0, but it must be above 0"),
        ("lognormal:median=1,sigma=-1", "sigma=-1, but it must be 0 or more"),
        ("lognormal:median=1,sigma=11", "sigma=11, but it must be 10 or less"),
        ("trace:", "'' is no option of trace; write trace:option=value"),
    ],
)
def test_bad_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(text)
