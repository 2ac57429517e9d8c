"""What a policy of somebody's own answers that is none: an error with its name, before any work or at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline import Reducer, Strategy, train
from paceline.aggregation import Aggregation, Apply, Arrival, Discard, Gradient, Release
from paceline.core.errors import InputError, PacelineError
from paceline.reduction import Reduction
from tests.engine.programs import batchnorm, program


class Base(Aggregation[int]):
    """As asynchronous."""

    def start(self, replicas: int) -> int:
        return 0

    def arrived(self, state: int, arrival: Arrival) -> Any:
        return state, (Apply(((arrival, 1.0),)), Release((arrival.replica,)))

    def left(self, state: int, replica: int, reason: str) -> Any:
        return state, ()

    def joined(self, state: int, replica: int) -> Any:
        return state, ()

    def waits_for(self, state: int) -> int:
        return 1


def trained(**methods: Any) -> Any:
    """Train with a policy that differs from the base in these methods or properties."""
    policy = dataclass(frozen=True)(type("Mine", (Base,), methods))()
    return train(
        program(model=batchnorm), Strategy(replicas=2, aggregation=policy), steps=3, engine="virtual", progress=False
    )


def decides(decision: Callable[[Arrival], Any]) -> Any:
    return lambda self, state, arrival: (state, decision(arrival))


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (lambda a: (Apply(()), Release((a.replica,))), "it has no Δ"),
        (lambda a: (Apply(((a, math.nan),)),), "a weight is no finite number"),
        (lambda a: (Apply(((a, "1"),)),), "its deltas are no such pairs"),
        (lambda a: (Apply((a,)),), "its deltas are no such pairs"),
        (lambda a: (Apply(((a, 1.0),), -1.0),), "its rate is no finite number of at least 0"),
        (lambda a: (Apply(((a, 1.0),)), Release(a.replica)), "its replicas are no numbers of replicas"),
        (lambda a: (Discard(a.clock),), "its arrivals are no Δs"),
        (lambda a: (Apply(((a, 1.0),)), Release((99,))), "let replica 99 go on; there are replicas 0 to 1"),
        (lambda a: ("apply",), "that is no action; write Apply, Release, Discard or Cancel"),
        (lambda a: (Release((a.replica,)),), "still holds Δs .* but no replica is left"),
        (lambda a: Apply(((a, 1.0),)), r"must return \(state, decision\), and a decision is a tuple"),
        (lambda a: [Release((a.replica,))], r"must return \(state, decision\), and a decision is a tuple"),
    ],
)  # fmt: skip
def test_a_decision_that_is_none(decision: Callable[[Arrival], Any], said: str) -> None:
    with pytest.raises(PacelineError, match=f"^<Mine> .*{said}"):
        trained(arrived=decides(decision))


@pytest.mark.parametrize("answer", [None, (Release((0,)),), (0, (), ())])
def test_an_answer_that_is_none(answer: object) -> None:
    with pytest.raises(PacelineError, match=r"^<Mine> answered .* to an event; arrived\(\), left\(\), joined\(\)"):
        trained(arrived=lambda self, state, arrival: answer)


@pytest.mark.parametrize(
    ("name", "value", "write"),
    [
        ("delta", "gradient", r"Gradient\(\), Accumulated"),
        ("delta", Gradient, "that is a class, write its object"),
        ("adopt", None, r"Replace\(\), Mix"),
        ("needs", frozenset({"los"}), "of loss, norm, agreement, server"),
        ("needs", "loss", r"frozenset\(\{'loss'\}\)"),
        ("collective", "max", "None, 'mean', 'sum'"),
        ("portions", 0, "None, 8"),
        ("reducer", "median", "None, a Reducer's object"),
    ],
)
def test_a_property_of_another_type(name: str, value: object, write: str) -> None:
    with pytest.raises(InputError, match=f"^<Mine>: {name} is .*; return one of .*{write}"):
        trained(**{name: property(lambda self: value)})


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("slots", lambda self, replicas: 0, r"slots\(\) is 0"),
        ("waits_for", lambda self, state: None, r"waits_for\(\) is None"),
        ("deadline", lambda self, state: math.nan, r"deadline\(\) is nan"),
        ("needs", lambda self: frozenset({"loss"}), "that is a method, write @property above def needs"),
        ("resolved", lambda self, *, learning_rate, replicas: None, r"resolved\(\) returned None; return self"),
    ],
)
def test_a_method_that_answers_something_else(method: str, answer: Callable[..., Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        trained(**{method: answer})


def test_weights_that_add_up_to_0_leave_running_buffers_as_they_are() -> None:
    run = trained(arrived=decides(lambda a: (Apply(((a, 0.0),)), Release((a.replica,)))))
    start = program(model=batchnorm).build().state_dict()
    assert run.summary["applied"] == 6
    for name, tensor in run.state.items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, start[name]), name


@dataclass(frozen=True)
class Returns(Reducer):
    """Returns what it was to write."""

    def combine(self, given: Reduction, out: torch.Tensor) -> Any:
        return torch.stack(list(given.deltas)).amax(0)


@dataclass(frozen=True)
class Numbers(Reducer):
    """Its statistics are no list."""

    def statistics(self, deltas: Any) -> Any:
        return float(deltas[0].sum())

    def combine(self, given: Reduction, out: torch.Tensor) -> None:
        out.copy_(given.deltas[0])


@pytest.mark.parametrize(
    ("reducer", "said"),
    [
        (Returns(), r"^combine\(\) of <Returns> returned a Tensor; it must write .* into out"),
        (Numbers(), r"^statistics\(\) of <Numbers> returned .*; return a list of numbers, or \[\]"),
    ],
)
def test_a_reducer_that_answers_something_else(reducer: Reducer, said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        trained(reducer=property(lambda self: reducer))
