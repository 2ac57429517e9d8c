"""LARS and LAMB on the engines: the norms are those of whole parameters, wherever A lies and whoever applies.

The other side has no optimizer of Paceline's: it is the papers' formulas, parameter after parameter.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from torch.optim.lr_scheduler import ExponentialLR

from paceline import Lamb, Lars, Run, train, warmup
from paceline.aggregation import Aggregation, registered
from paceline.engine.coordinator import Coordinator
from paceline.engine.local.engine import LocalEngine
from paceline.engine.local.fault_injection import EventScript
from tests import oracle
from tests.engine import programs
from tests.optim.literal import LiteralLamb, LiteralLars

STEPS = 13
"""Two and a half epochs and more of 50 samples, three replicas of 4 samples each: uneven last batches."""

ROUNDING = 1e-11
"""Both sides add the same products in another order, some hundred roundings of 2e-16 over 13 steps; and in LARS each
step's length hangs on two norms."""

NORMALISED = 1e-9
"""LAMB divides a gradient by its own size, also where it is nearly zero."""

OPTIONS: dict[str, tuple[Any, Any, dict[str, Any], float]] = {
    "lars": (Lars, LiteralLars, {"lr": 20.0, "weight_decay": 0.01}, ROUNDING),
    "lars with nesterov": (Lars, LiteralLars, {"lr": 20.0, "nesterov": True}, ROUNDING),
    "lamb": (Lamb, LiteralLamb, {"lr": 0.02, "weight_decay": 0.01}, NORMALISED),
    "lamb but for vectors": (Lamb, LiteralLamb, {"lr": 0.02, "weight_decay": 0.1, "exclude_vectors": True}, NORMALISED),
}

SCHEDULE = functools.partial(warmup, steps=4, then=functools.partial(ExponentialLR, gamma=0.9))


def pair(name: str, **fields: Any) -> tuple[Any, Any, float]:
    """The same program with our optimizer and with the formula."""
    ours, literal, options, bound = OPTIONS[name]
    one, other = (programs.program(optimizer=functools.partial(o, **options), **fields) for o in (ours, literal))
    return one, other, bound


def run(program: Any, strategy: str, engine: Any, **settings: Any) -> Run:
    return train(program, strategy, engine=engine, progress=False, **settings)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_in_virtual_time_replicas_are_one_process(name: str, replicas: int) -> None:
    program, literal, bound = pair(name, clip_norm=0.5, scheduler=SCHEDULE)
    trained = run(program, f"replicas={replicas}", "virtual", steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(literal, replicas, STEPS), bound)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_processes_are_one_process(engine: LocalEngine, name: str, replicas: int) -> None:
    # More than 600 parameters: enough to be divided among replicas, were the optimizer one that can be.
    program, literal, bound = pair(name, model=programs.wide, scheduler=SCHEDULE)
    trained = run(program, f"replicas={replicas}", engine, steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(literal, replicas, STEPS), bound)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_accumulated_and_clipped(engine: LocalEngine, name: str) -> None:
    program, literal, bound = pair(name, clip_norm=0.05)
    trained = run(program, "replicas=2 accumulate=3", engine, steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(literal, 2, STEPS, 3), bound)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_hogwild_alone_is_one_process(engine: LocalEngine, name: str) -> None:
    program, literal, bound = pair(name)
    trained = run(program, "replicas=1 aggregation=hogwild", engine, steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(literal, 1, STEPS), bound)


# ---------------------------------------------------------------------------------------------------------- policies

SPOKEN = {
    "buffered": "buffered:k=2",
    "deadline": "deadline:seconds=1000",
    "elastic-averaging": "elastic-averaging:period=2",
    "local-steps": "local-steps:period=2",
    "smooth-switch": "smooth-switch:every=5",
}
"""Options with which a policy does in six steps what it is there for; a deadline that all arrive before."""

POLICIES = [SPOKEN.get(name, name) for name in sorted(set(registered(Aggregation)) - {"hogwild"})]
"""Hogwild has no order that could be replayed."""

TIMES = "compute=exponential:mean=1 apply=0.1 gradient=0.05"
"""An order of arrivals that is far from turns, with Δs that wait for the server."""


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(replica, step) of each Δ as it reaches a coordinator."""
    seen: list[tuple[int, int]] = []
    plain = Coordinator.arrived

    def arrived(self: Coordinator, arrival: Any) -> None:
        seen.append((arrival.replica, arrival.clock))
        plain(self, arrival)

    monkeypatch.setattr(Coordinator, "arrived", arrived)
    return seen


@pytest.fixture
def scripted(engine: LocalEngine) -> Iterator[LocalEngine]:
    """An engine whose script is taken away afterwards."""
    yield engine
    engine.script = EventScript()


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_in_virtual_time_and_in_processes(
    scripted: LocalEngine, arrivals: list[tuple[int, int]], name: str, policy: str
) -> None:
    program, literal, bound = pair(name)
    strategy = f"replicas=3 aggregation={policy}"
    expected = run(literal, strategy, "virtual", steps=6, times=TIMES)
    order = tuple(arrivals)
    virtual = run(program, strategy, "virtual", steps=6, times=TIMES)
    scripted.script = EventScript().order(*order)
    real = run(program, strategy, scripted, steps=6)
    assert expected.summary["updates"] == virtual.summary["updates"] == real.summary["updates"] > 0
    oracle.assert_same(virtual.model, expected.state, bound)
    oracle.assert_same(real.model, expected.state, bound)
