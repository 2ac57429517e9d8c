"""The state of a run at its server follows from its events alone, also from a copy that was made at any moment."""

import asyncio
import functools
import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from paceline.core.errors import PacelineError, WorkerError
from paceline.core.records import ReplicaPosition
from paceline.engine.base import Job
from paceline.engine.worker_metrics import Figures
from paceline.strategy import Strategy
from paceline.train_options import TrainOptions, job_of
from tests.engine import programs

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

from paceline.engine.ray.engine import RayEngine
from paceline.engine.server import messages
from paceline.engine.server.event_log import Batch, EventLog, Follower
from paceline.engine.server.server_state import ServerState

POLICIES = [
    "synchronous",
    "synchronous:backups=1",
    "asynchronous:damping=staleness",
    "smooth-switch:every=4,hold=false",
    "stale-synchronous:bound=1",
    "buffered:k=2,cancel=true",
    "smooth-switch:threshold=loss-driven",
    "local-steps:period=2,over=asynchronous",
    "elastic-averaging:period=2,elasticity=0.2",
    "decoupled:period=2,quorum=2,grace=0.5",
]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": functools.partial(SGD, lr=0.1, momentum=0.9)},
    "adam": {"optimizer": functools.partial(Adam, lr=0.01), "model": programs.batchnorm},
    "clipped and scheduled": {
        "optimizer": functools.partial(AdamW, lr=0.01),
        "scheduler": functools.partial(StepLR, step_size=4, gamma=0.5),
        "clip_norm": 0.05,
    },
    "groups": {"optimizer": programs.half_decayed},
}

FIGURES = Figures(1, 1, 1, 1)

Events = list[tuple[str, tuple[Any, ...]]]


def job(policy: str = "synchronous", optimizer: str = "momentum", **settings: Any) -> Job:
    program = programs.program(**{"train": programs.data(samples=48)} | OPTIMIZERS[optimizer])
    options = TrainOptions(**{"steps": 12, "evaluate_every": 3, "on_death": "replace"} | settings)
    return job_of(program, Strategy.parse(f"replicas=3 aggregation={policy}"), RayEngine(), options)


def delta(state: ServerState, number: int) -> list[messages.Bytes]:
    """Made from its number, which makes it look like no other."""
    made, generator = state.executor.owner.state.layout.new(), torch.Generator().manual_seed(number)
    for vector in made.vectors:
        vector.copy_(torch.randint(-9, 9, vector.shape, generator=generator))
    return messages.arrays_of(made)


class Driver:
    """Has a state take events as they might come, and writes them down."""

    def __init__(self, state: ServerState, seed: int) -> None:
        self.state, self.draw, self.now, self.made = state, random.Random(seed), 0.0, 0
        self.events: Events = []

    def take(self, event: str, *args: Any) -> None:
        self.events.append((event, args))
        getattr(self.state, event)(*args)

    def begin(self) -> None:
        for replica in range(3):
            self.take("ready", replica, 0.0)
        self.take("begin", 1)

    def step(self) -> None:
        """Let one replica push, or stop a cancelled attempt; now and then it dies, or a snapshot is scored."""
        state, draw, coordinator = self.state, self.draw, self.state.coordinator
        self.now += draw.random()
        computing = sorted(coordinator.computing & coordinator.present)
        if not computing:
            return
        replica = draw.choice(computing)
        record = state.records[replica]
        if draw.random() < 0.1:
            self.take("lost", replica, "its process ended", self.now, True)
            self.take("ready", replica, self.now)
        elif replica in coordinator.cancelling:
            self.take("cancelled", replica, FIGURES)
        else:
            self.made += 1
            grant = record.reply_after(record.attempt - 1)
            assert grant is not None
            assert grant[0] is not None
            loss = draw.random()
            completion = messages.PushCompletion(
                replica, record.incarnation, record.attempt, grant[0].version, 4, True, loss, FIGURES
            )
            self.take("arrived", completion, self.now, {"norm": loss, "loss": loss}, delta(state, self.made))
        self.take("handled", self.now)
        if state.queue.snapshots and draw.random() < 0.5:
            self.take("evaluated", state.queue.snapshots[0][1])
        if draw.random() < 0.2:
            self.take("tick", self.now)


def content(state: ServerState) -> dict[str, Any]:
    """All that a run depends on; of tensors the bits."""
    tensors = {chunk.name: chunk.tensor.clone() for chunk in state.executor.snapshot([]).chunks}
    grants = [(r.attempt, r.incarnation, r.ready, r.figures, r.reply_after(r.attempt - 1)) for r in state.records]
    return {
        "tensors": {name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
        "coordinator": state.coordinator.state(),
        "history": state.loop.history.state(),
        "exits": state.loop.exits,
        "grants": [(*rest, reply and (reply[0], [a.tobytes() for a in reply[1]])) for *rest, reply in grants],
        "snapshots": [([v.numpy().tobytes() for v in s.vectors], info) for s, info in state.queue.snapshots],
        "optimizer": state.executor.owner.flat_optimizer.state_json(),
        "phase": (state.phase, state.began, state.seconds, state.starting),
    }


def replayed(state: ServerState, events: Events) -> ServerState:
    for event, args in events:
        getattr(state, event)(*args)
    return state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_events_make_the_same_state_also_from_a_copy(policy: str, optimizer: str) -> None:
    made = job(policy, optimizer)
    driver = Driver(ServerState(made), seed=len(policy))
    copies: list[tuple[int, bytes]] = []
    for number in range(40):
        if number == 3:
            driver.begin()
        if number > 3:
            driver.step()
        if number in (0, 3, 10, 25):
            copies.append((len(driver.events), pickle.dumps(driver.state.copy())))
    expected = content(driver.state)
    assert expected["coordinator"].version > 3
    assert content(replayed(ServerState(made), driver.events)) == expected
    for taken, copied in copies:
        assert content(replayed(ServerState(made, pickle.loads(copied)), driver.events[taken:])) == expected, taken


def test_a_copy_is_one_of_its_moment() -> None:
    made = job()
    driver = Driver(ServerState(made), seed=1)
    driver.begin()
    for _ in range(10):
        driver.step()
    before, copied = content(driver.state), pickle.dumps(driver.state.copy())
    for _ in range(10):
        driver.step()
    assert content(ServerState(made, pickle.loads(copied))) == before != content(driver.state)


def begun(**settings: Any) -> Driver:
    driver = Driver(ServerState(job(**settings)), seed=2)
    driver.begin()
    return driver


def test_a_delta_is_taken_once_and_only_of_the_present_actor() -> None:
    state = begun().state
    assert state.takes(1, 0, 1)
    assert not state.takes(1, 0, 2), "it was not granted"
    first = state.records[1].reply_after(0)
    assert first is not None
    state.lost(1, "its process ended", 1.0, True)
    assert not state.takes(1, 0, 1), "a zombie's"
    assert state.takes(1, 1, 1), "the same attempt again"
    assert state.assignment(0, 1) == messages.ReplicaAssignment(0, 1, 1, 0, 0)
    assert state.records[1].reply_after(0) is first, "the same A, by reference"
    completion = messages.PushCompletion(1, 1, 1, 0, 4, True, 0.5, FIGURES)
    state.arrived(completion, 1.0, {}, delta(state, 1))
    assert not state.takes(1, 1, 1), "it was taken"
    assert state.records[1].reply_after(1) is None, "it waits for the others"
    assert state.coordinator.positions[1] == ReplicaPosition(1, 1, 1)


def test_one_that_dies_while_it_waits_is_not_given_its_step_again() -> None:
    state = begun().state
    state.arrived(messages.PushCompletion(1, 0, 1, 0, 4, True, 0.5, FIGURES), 1.0, {}, delta(state, 1))
    state.lost(1, "its process ended", 1.0, True)
    assert state.assignment(0, 1) == messages.ReplicaAssignment(0, 1, 1, 1, 1)
    assert state.records[1].reply_after(1) is None


def test_deaths_at_one_step_are_bounded() -> None:
    state = begun().state
    for _ in range(3):
        state.lost(1, "its process ended", 1.0, True)
    with pytest.raises(WorkerError, match="replica 1 died 4 times at its step 1: its process ended"):
        state.lost(1, "its process ended", 1.0, True)


class Loop:
    """Runs what is to be run soon when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.soon: list[Any] = []
        monkeypatch.setattr("asyncio.get_running_loop", lambda: self)

    def call_soon(self, function: Any) -> None:
        self.soon.append(function)


def test_a_standby_takes_batches_in_order_and_none_after_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    made, loop = job(), Loop(monkeypatch)
    driver = Driver(ServerState(made), seed=3)
    follower = Follower(7, ServerState(made, driver.state.copy()))
    batches: list[tuple[Batch, list[messages.Bytes]]] = []
    for number in range(2, 12):
        before = len(driver.events)
        if number == 2:
            driver.begin()
        driver.step()
        arrays = next((args[-1] for event, args in driver.events[before:] if event == "arrived"), [])
        events = tuple((e, args[:-1] if e == "arrived" else args) for e, args in driver.events[before:])
        batches.append((Batch(7, number, events, driver.state.counts()), arrays))
        if number == 8:
            expected = content(driver.state)
    for batch, arrays in [*reversed(batches[:4]), *batches[4:7], *batches[8:]]:  # the one but two before last is lost
        follower.follow(batch, arrays)
        assert batch.number != 8 or loop.soon, "it is taken a moment later"
    assert content(follower.promote()) == expected
    with pytest.raises(PacelineError, match="has taken over"):
        follower.follow(*batches[7])


def test_a_standby_that_decides_otherwise_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made, loop = job(), Loop(monkeypatch)
    driver = Driver(ServerState(made), seed=3)
    follower = Follower(7, ServerState(made, driver.state.copy()))
    driver.begin()
    follower.follow(Batch(7, 2, tuple(driver.events), (1, 0)), [])
    loop.soon.pop()()
    with pytest.raises(PacelineError, match="a policy must decide by its arguments alone"):
        follower.follow(Batch(7, 3, (), (1, 0)), [])
    with pytest.raises(PacelineError, match="a policy must decide by its arguments alone"):
        follower.promote()


def test_a_standby_that_has_no_copy_yet_may_be_late() -> None:
    async def call(method: str, *args: Any) -> None:
        raise TimeoutError

    state: Any = None
    log, lost = EventLog(1, state, lambda: lost.append(True), 1.0), list[bool]()
    standby: Any = SimpleNamespace(call=call)
    log._standby = standby
    asyncio.run(log._forward(Batch(1, 1, (), (0, 0)), (), ()))
    assert lost == [True]
    assert log.lost.startswith("it has acknowledged nothing for 0")
