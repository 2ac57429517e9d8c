"""kill -9 at any moment: training goes on without that replica, which is named, and no Δ is lost or used twice."""

import contextlib
import functools
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import Program, Run, Strategy, WorkerError, train
from paceline.clock.times import Delay
from paceline.engine.coordinator import Coordinator
from paceline.engine.local.engine import LocalEngine
from paceline.engine.local.fault_injection import EventScript, When
from tests import oracle
from tests.engine import programs
from tests.engine.local import moments

Local = Callable[..., Run]

STEPS = 6

POLICIES = [
    "synchronous",
    "synchronous:backups=1",
    "asynchronous",
    "smooth-switch:every=4",
    "smooth-switch:every=2,hold=false",
    "stale-synchronous:bound=1",
    "buffered:k=2",
    "buffered:k=2,hold=false",
    "buffered:k=2,cancel=true",
    "buffered:k=3,hold=false,cancel=true",
    "local-steps:period=2",
    "local-steps:period=2,over=asynchronous",
    "elastic-averaging:period=2,elasticity=0.2",
    "decoupled:period=2,quorum=2,grace=0.5",
    "hogwild",
]


def assert_went_on(run: Run, *dead: int, replicas: int = 3) -> None:
    """The dead are named, the others made all their steps, and each Δ met one fate."""
    assert sorted((d.replica, d.reason) for d in run.left) == [(r, "killed by SIGKILL") for r in sorted(dead)]
    assert all(0 <= d.time_s <= run.summary["seconds"] for d in run.left)
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]
    assert sum(run.summary["staleness"].values()) == run.summary["applied"]
    assert run.summary["steps"] == STEPS
    assert not run.summary["interrupted"]
    assert len(run.summary["utilisation"]) == replicas


@pytest.mark.parametrize("when", ["sent", "taken"])
@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy(local: Local, policy: str, when: When) -> None:
    step = 1 if policy.startswith(("local", "elastic", "decoupled")) else 3  # two own steps each: there are three Δs
    run = local(
        programs.program(),
        f"replicas=3 aggregation={policy}",
        steps=STEPS,
        script=EventScript().kill(replica=1, step=step, when=when),
    )
    assert_went_on(run, 1)


MOMENTS = [
    moments.before_computing,
    moments.between_two_layers,
    moments.in_the_backward_pass,
    moments.having_written_delta,
    moments.having_told_but_not_rung,
    moments.having_pushed,
]

HAD_PUSHED = {moments.having_told_but_not_rung, moments.having_pushed}


def without_one(steps: int, dead: int, after: int, program: Program | None = None) -> oracle.Values:
    """Three replicas in lockstep, of which one takes part in the first ``after`` rounds alone.

    What it leaves of the epoch the others take once their own streams have come to its end.
    """
    program = program or programs.program()
    plain, data = oracle.Plain(program), oracle.order(program, 3)
    rounds = data.rounds_per_epoch(dead)
    left = [batch for k in range(after, rounds) if len(batch := data.batch(dead, k))]
    taken = [0] * 3
    for k in range(steps):
        seen: list[int] = []
        for replica in [r for r in range(3) if r != dead or k < after]:
            if replica != dead and taken[replica] == rounds and left:
                seen += left.pop(0).tolist()
            else:
                seen += data.batch(replica, taken[replica]).tolist()
                taken[replica] += 1
        plain.step(plain.gradient(seen))
    return plain.values()


@pytest.mark.parametrize("prepare", MOMENTS, ids=lambda moment: moment.__name__)
def test_synchronous_training_goes_on_with_one_fewer_from_that_round_on(
    local: Local, prepare: Callable[[Any], None]
) -> None:
    """Parameter by parameter: what was pushed before the death counts, what was not does not."""
    loop = functools.partial(moments.loop, replica=1, step=3, prepare=prepare)
    run = local(programs.program(), "replicas=3", steps=STEPS, loop=loop)
    assert_went_on(run, 1)
    expected = without_one(STEPS, dead=1, after=3 if prepare in HAD_PUSHED else 2)
    oracle.assert_same(run.model, expected, 1e-12)  # sums in another order


def test_in_a_delay(local: Local) -> None:
    """A thousand seconds: whoever waits for the end of it is not done before the test is."""
    program = programs.program()
    (slowed,) = Delay.parse(LONG).slowed(replicas=3, seed=program.seed)
    loop = functools.partial(moments.loop, replica=slowed, step=1, prepare=moments.in_a_delay)
    run = local(program, "replicas=3", steps=STEPS, loop=loop, delay=LONG)
    assert_went_on(run, slowed)
    oracle.assert_same(run.model, without_one(STEPS, dead=slowed, after=0), 1e-12)


LONG = "fraction=0.34 constant:value=1000"


def test_what_lies_in_the_buffer_stays_good(local: Local) -> None:
    """Replica 1 dies while its Δ waits for two others; the update has all three."""
    script = EventScript().order((1, 1), (0, 1), (2, 1)).kill(replica=1, step=1, when="taken")
    run = local(programs.program(), "replicas=3", steps=STEPS, script=script)
    assert_went_on(run, 1)
    oracle.assert_same(run.model, without_one(STEPS, dead=1, after=1), 1e-12)


@pytest.mark.parametrize(
    "policy", ["asynchronous", "smooth-switch:every=5,combine=sum", "stale-synchronous:combine=sum"]
)
@pytest.mark.parametrize("seed", range(3))
def test_at_any_moment_each_delta_is_applied_once_or_discarded(
    local: Local, monkeypatch: pytest.MonkeyPatch, engine: LocalEngine, policy: str, seed: int
) -> None:
    """Trained weights count how often each sample was applied: by what arrived, at random deaths."""
    chance, plain, seen = random.Random(seed), Coordinator.arrived, []
    deadly = chance.sample(range(1, 40), 2)

    def arrived(self: Coordinator, arrival: Any) -> None:
        seen.append(self._dispatcher._given[arrival.replica, arrival.clock])
        plain(self, arrival)
        if len(seen) in deadly:
            assert engine._fork_server is not None
            pids = list(engine._fork_server._children)[:4]  # the fifth is the scorer
            with contextlib.suppress(ProcessLookupError):  # the first to die may be chosen again
                os.kill(chance.choice(pids), signal.SIGKILL)

    monkeypatch.setattr(Coordinator, "arrived", arrived)
    program = moments.counting()
    run = local(program, f"replicas=4 aggregation={policy}", steps=15)
    assert 1 <= len(run.left) <= 2
    assert {d.reason for d in run.left} == {"killed by SIGKILL"}
    expected, data = torch.zeros(moments.SAMPLES, dtype=torch.float64), oracle.order(program, 4)
    for stream, number, _ in seen:
        expected[torch.as_tensor(data.batch(stream, number))] += 1
    assert run.summary["gradients"] == len(seen) == run.summary["applied"] + run.summary["discarded"]
    assert run.summary["discarded"] == 0
    assert torch.equal(run.state["weight"], expected)


def test_all_of_them(local: Local) -> None:
    script = EventScript().kill(replica=0, step=2).kill(replica=1, step=3)
    with pytest.raises(WorkerError, match=r"every replica died: . killed by SIGKILL; . killed by SIGKILL"):
        local(programs.program(), "replicas=2 aggregation=asynchronous", steps=STEPS, script=script)


# ------------------------------------------------------------------------------------------------------------- start-up


def test_while_it_starts_nothing_can_be_trained(local: Local) -> None:
    main = os.getpid()

    def model() -> torch.nn.Module:
        if os.getpid() != main:
            moments.die()
        return programs.mlp()

    with pytest.raises(WorkerError, match=r"replica [01] ended while it started: killed by SIGKILL"):
        local(programs.program(model=model), "replicas=2", steps=STEPS)


def test_ready_but_not_yet_at_work(local: Local) -> None:
    """Replica 0 dies at the head of its loop, which may be before the others are ready."""

    def loop(worker: Any) -> None:
        if worker.replica == 0:
            moments.die()
        for batch in worker.batches():
            worker.step(batch)

    run = local(programs.program(), "replicas=3", steps=STEPS, loop=loop)
    assert_went_on(run, 0)


# --------------------------------------------------------------------------------------------- the other processes


@pytest.mark.parametrize("budget", [{"steps": STEPS}, {"steps": 10**6, "until": "updates>=3"}])
def test_the_scorer(local: Local, budget: dict[str, Any]) -> None:
    """Main makes its records; at once where the run waits for one."""
    main = os.getpid()

    def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
        if os.getpid() != main:
            moments.die()
        return 0.5

    program = programs.program(test=programs.data(), metrics={"accuracy": accuracy})
    run = local(program, "replicas=2", evaluate_every=1, **budget)
    assert run.left == []
    assert {record.test_accuracy for record in run.history} == {0.5}
    assert [record.updates for record in run.history][: STEPS + 1] == list(range(STEPS + 1))[: len(run.history)]
    assert len(run.history) == STEPS + 1 if "until" not in budget else run.summary["updates"] < 10**6


def test_the_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run under way goes on, and names replicas that die; the next run has a new fork server."""
    plain = Coordinator.arrived
    with LocalEngine() as engine:

        def arrived(self: Coordinator, arrival: Any) -> None:
            plain(self, arrival)
            assert engine._fork_server is not None
            if arrival.clock == 2 and engine._fork_server.alive:
                os.kill(engine._fork_server.pid, signal.SIGKILL)
                engine._fork_server._process.wait()

        monkeypatch.setattr(Coordinator, "arrived", arrived)
        engine.script = EventScript().kill(replica=1, step=4)
        run = train(programs.program(), Strategy(replicas=3), engine=engine, steps=STEPS, progress=False)
        assert run.summary["updates"] == STEPS
        assert [(d.replica, d.reason) for d in run.left] == [(1, "ended, its status lost with the fork server")]
        monkeypatch.undo()
        assert engine._fork_server is not None
        before = engine._fork_server.pid
        again = train(programs.program(), Strategy(replicas=3), engine=engine, steps=STEPS, progress=False)
        assert engine._fork_server.pid != before
        assert [d.replica for d in again.left] == [1]
