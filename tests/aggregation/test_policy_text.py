"""Policies as text, there and back; and how a class gets a name."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings

from paceline.aggregation import (
    Aggregation,
    Buffered,
    Curve,
    Exponential,
    LocalSteps,
    LossDriven,
    Outer,
    PerLearningRate,
    SmoothSwitch,
    Synchronous,
    parse,
    register,
    registered,
    text_of,
)
from paceline.aggregation.base import Arrival, Decision, combined
from paceline.core.errors import InputError
from paceline.core.registry import family_of
from tests.aggregation.policy_values import policies

CHECK = settings(max_examples=300, deadline=None, derandomize=True)


@CHECK
@given(policies())
def test_parse_undoes_print(policy: Aggregation[Any]) -> None:
    text = text_of(policy)
    assert parse(text) == policy
    assert text_of(parse(text)) == text
    assert not set(text) & set(" \"'")


CANONICAL = [
    ("synchronous", Synchronous()),
    ("smooth-switch", SmoothSwitch()),
    ("smooth-switch:every=300,combine=sum", SmoothSwitch(every=300.0, combine="sum")),
    ("smooth-switch:every=5/lr", SmoothSwitch(PerLearningRate(5.0))),
    ("smooth-switch:threshold=loss-driven", SmoothSwitch(threshold=LossDriven())),
    ("smooth-switch:threshold=(exponential:doubling=0.5)", SmoothSwitch(threshold=Exponential(doubling=0.5))),
    ("local-steps:outer=nesterov", LocalSteps(outer=Outer())),
    ("local-steps:outer=(momentum:lr=1,momentum=0)", LocalSteps(outer=Outer(1, 0, nesterov=False))),
    (
        "local-steps:period=8,over=(buffered:k=4,hold=false),outer=(nesterov:lr=0.5)",
        LocalSteps(8, Buffered(4, hold=False), Outer(0.5)),
    ),
]


@pytest.mark.parametrize(("text", "policy"), CANONICAL)
def test_canonical(text: str, policy: Aggregation[Any]) -> None:
    assert text_of(policy) == text
    assert parse(text) == policy


FREE = [
    ("smooth-switch:every=500", "smooth-switch"),
    ("smooth-switch:threshold=(step:every=70)", "smooth-switch:every=70"),
    ("buffered:hold=false,k=4", "buffered:k=4,hold=false"),
    ("local-steps:over=synchronous,outer=none", "local-steps"),
    ("local-steps:over=buffered:k=4", "local-steps:over=(buffered:k=4)"),
    ("smooth-switch:every=5e2", "smooth-switch"),
]


@pytest.mark.parametrize(("text", "canonical"), FREE)
def test_reading_is_more_liberal_than_printing(text: str, canonical: str) -> None:
    assert text_of(parse(text)) == canonical


WRONG = [
    ("asynchronos", "unknown aggregation 'asynchronos'; did you mean 'asynchronous'"),
    ("", "unknown aggregation ''"),
    ("smooth-switch:evry=5", "unknown option of smooth-switch 'evry'; did you mean 'every'"),
    ("smooth-switch:rule=step", "unknown option of smooth-switch 'rule'"),
    ("smooth-switch:", "no option of smooth-switch"),
    ("smooth-switch:every", "'every' is no option of smooth-switch; write"),
    ("smooth-switch:every=", "'every='"),
    ("smooth-switch:every=5/rl", "smooth-switch:every=5/rl, but it must be a number or a number before /lr"),
    ("smooth-switch:every=0", "smooth-switch:every=0.0, but it must be a number above 0"),
    ("smooth-switch:every=0/lr", "multiple=0"),
    ("smooth-switch:every=5,every=6", "says every twice"),
    ("smooth-switch:every=5,threshold=linear", "both say what K is"),
    ("smooth-switch:threshold=liner", "unknown threshold 'liner'; did you mean 'linear'"),
    ("smooth-switch:threshold=(linear:slop=1)", "unknown option of linear 'slop'; did you mean 'slope'"),
    ("smooth-switch:threshold=<f>", "<f> has no text form"),
    ("smooth-switch:hold=yes", "smooth-switch:hold=yes, but it must be true or false"),
    ("synchronous:combine=men", "unknown synchronous:combine 'men'; did you mean 'mean'"),
    ("buffered:k=2.5", "buffered:k=2.5, but it must be a whole number"),
    ("buffered:k=0", "write buffered:k=1"),
    ("local-steps:over=(buffered:k=4", "a parenthesis or bracket in .* is not closed, or not opened"),
    ("local-steps:over=buffered:k=4),period=3", "a parenthesis or bracket in .* is not closed, or not opened"),
    ("local-steps:outer=adam", "unknown outer optimizer 'adam'"),
    ("local-steps:outer=(nesterov:nesterov=true)", "unknown option of nesterov 'nesterov'"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_wrong_text(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(text)


def test_what_only_python_can_say_is_shown_but_not_read() -> None:
    def schedule(u: int) -> int:
        return 1 + u // 3

    text = text_of(SmoothSwitch(threshold=schedule))
    assert text == "smooth-switch:threshold=<schedule>"
    with pytest.raises(InputError, match="has no text form; build the threshold in Python"):
        parse(text)
    assert text_of(SmoothSwitch(threshold=lambda u: u)) == "smooth-switch:threshold=<lambda>"


@dataclass(frozen=True)
class Patient(Aggregation[None]):
    """A policy as a user writes it: one class in one file."""

    patience: int
    over: Aggregation[Any] = field(default_factory=Synchronous)

    def start(self, replicas: int) -> None:
        del replicas

    def arrived(self, state: None, arrival: Arrival) -> tuple[None, Decision]:
        return state, combined((arrival,), "mean")

    def left(self, state: None, replica: int, reason: str) -> tuple[None, Decision]:
        del replica, reason
        return state, ()

    def joined(self, state: None, replica: int) -> tuple[None, Decision]:
        del replica
        return state, ()

    def waits_for(self, state: None) -> int:
        del state
        return 1


@pytest.fixture
def registry() -> Iterator[None]:
    """Takes what a test registers back."""
    kinds = [k for k in (family_of(Aggregation), family_of(Curve)) if k]
    before = [dict(k.entries) for k in kinds]
    yield
    for kind, entries in zip(kinds, before, strict=True):
        kind.entries.clear()
        kind.entries.update(entries)


@pytest.mark.usefixtures("registry")
def test_a_registered_class_is_read_and_printed() -> None:
    assert text_of(Patient(3)) == "<Patient>"
    assert register("patient")(Patient) is Patient
    assert registered(Aggregation)["patient"] is Patient
    assert parse("patient:patience=3") == Patient(3)
    assert text_of(Patient(4, Buffered(k=2))) == "patient:patience=4,over=(buffered:k=2)"
    register("patient")(Patient)  # a notebook cell that is run again
    with pytest.raises(InputError, match="patient has no default for patience; write patient:patience"):
        parse("patient")


@pytest.mark.usefixtures("registry")
def test_a_threshold_joins_its_own_family() -> None:
    @register("halving")
    @dataclass(frozen=True)
    class Halving(Curve):
        def of(self, u: int) -> float:
            return 8 / (1 + u)

    assert parse("smooth-switch:threshold=halving") == SmoothSwitch(threshold=Halving())
    assert "halving" not in registered(Aggregation)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (dict[str, int], "halving:w=1: values of its type, dict, have no text; build the object in Python"),
        (Any, "values of its type, Any, have no text"),
        (
            "Nonsense",
            "Halving has a field whose type names 'Nonsense', which its module does not have; import or define",
        ),
    ],
)
def test_what_has_no_text(kind: Any, message: str) -> None:
    namespace = {"__annotations__": {"w": kind}, "w": None, "of": lambda self, u: 1.0, "__module__": __name__}
    register("halving")(dataclass(frozen=True)(type("Halving", (Curve,), namespace)))
    with pytest.raises(InputError, match=message):
        parse("smooth-switch:threshold=(halving:w=1)")


def test_a_class_that_is_registered_without_a_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"write @register\('my-policy'\) over the class"):
        register(Patient)  # type: ignore[arg-type]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("name", "cls", "message"),
    [
        ("synchronous", Patient, "the aggregation 'synchronous' is .*Synchronous already; write another name"),
        ("My Policy", Patient, "lower-case words"),
        ("plain", type("Plain", (), {}), "Plain can't be registered as 'plain'"),
        ("thawed", dataclass(type("Thawed", (Curve,), {})), "frozen dataclass"),
    ],
)
def test_what_can_not_be_registered(name: str, cls: type[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        register(name)(cls)
