"""A in several servers: the bits, or nearly, of one server, whatever the policy, and what becomes of a death."""

import contextlib
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Adagrad, Adam

from paceline import InputError, Run, Strategy, WorkerError, launch, train
from paceline.aggregation.base import Apply, Arrival, Decision, Discard, Release, Unsynchronized
from paceline.engine.base import Watcher
from paceline.engine.local.engine import LocalEngine
from paceline.engine.ray.engine import RayEngine
from tests import oracle
from tests.engine import programs
from tests.engine.local import moments, test_local_kills
from tests.engine.ray.test_push_stream import elsewhere
from tests.engine.ray.test_ray_checkpoints import ADAM, ENDLESS, newest_in
from tests.engine.ray.test_ray_failures import STEPS, assert_nothing_was_lost, once, training
from tests.engine.ray.test_ray_parity import FEATURES, MOMENTUM, OF_ONE, POLICIES, ROUNDING, by_calls

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]


@pytest.mark.parametrize(("name", "servers"), [("at borders", 2), ("at borders", 3), *((name, 3) for name in FEATURES)])
def test_in_lockstep_they_are_one_process(on_ray: OnRay, name: str, servers: int) -> None:
    whole = {"optimizer": functools.partial(Adagrad, lr=0.1)}, 1e-9
    fields, bound = whole if name == "at borders" else FEATURES[name]
    program = programs.program(**fields)
    trained = on_ray(program, Strategy(replicas=2, servers=servers), steps=9)
    oracle.assert_same(trained.model, oracle.one_process(program, 2, 9), bound)
    assert trained.summary["updates"] == 9


@pytest.mark.parametrize("policy", [*OF_ONE, "local-steps:period=2,fragments=2", "local-steps:period=3,outer=nesterov"])
def test_one_replica_does_what_virtual_time_says(on_ray: OnRay, policy: str) -> None:
    program, strategy = programs.program(optimizer=MOMENTUM), f"replicas=1 aggregation={policy}"
    virtual = train(program, strategy, engine="virtual", steps=STEPS, progress=False)
    real = on_ray(program, f"{strategy} servers=2", steps=STEPS)
    oracle.assert_same(real.model, virtual.state, ROUNDING)
    for count in ("updates", "gradients", "applied", "discarded", "staleness"):
        assert real.summary[count] == virtual.summary[count], count


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("policy", ["robust", "robust:trimmed-mean", "robust:by=(krum:faulty=0,best=2)"])
def test_a_round_of_three_is_reduced_as_in_virtual_time(on_ray: OnRay, policy: str, servers: int) -> None:
    """Distances of Krum are sums over slices, which all servers know."""
    program, strategy = programs.program(optimizer=MOMENTUM, clip_norm=0.1), f"replicas=3 aggregation={policy}"
    virtual = train(program, strategy, engine="virtual", steps=STEPS, progress=False)
    real = on_ray(program, f"{strategy} servers={servers}", steps=STEPS)
    oracle.assert_same(real.model, virtual.state, ROUNDING)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in OF_ONE])
def test_several_count_each_delta_once(on_ray: OnRay, policy: str) -> None:
    run = on_ray(programs.program(), f"replicas=3 servers=2 aggregation={policy}", steps=STEPS)
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]
    assert sum(run.summary["staleness"].values()) == run.summary["applied"] > 0


@pytest.mark.parametrize("loop", [elsewhere, by_calls])
def test_from_another_host_and_without_streams(engine: RayEngine, loop: Any) -> None:
    program = programs.program(optimizer=MOMENTUM)
    run = launch(loop, program, "replicas=3 servers=3", engine=engine, steps=4, progress=False, evaluate_every=10**6)
    oracle.assert_same(run.model, oracle.one_process(program, 3, 4), ROUNDING)


@pytest.mark.parametrize("team", ["stages=2", "shards=2", "stages=2 shards=2"])
def test_over_replicas_of_several_workers(on_ray: OnRay, team: str) -> None:
    program = programs.program(model=programs.wide, optimizer=MOMENTUM, clip_norm=0.5)
    run = on_ray(program, f"replicas=2 {team} servers=2", steps=4)
    oracle.assert_same(run.model, oracle.one_process(program, 2, 4), ROUNDING)


def test_more_servers_than_parameters(on_ray: OnRay) -> None:
    program = programs.program(optimizer=functools.partial(Adagrad, lr=0.1))
    run = on_ray(program, "replicas=2 servers=6", steps=3)
    oracle.assert_same(run.model, oracle.one_process(program, 2, 3), 1e-9)


def test_running_means_and_every_evaluation(on_ray: OnRay) -> None:
    data = programs.data(samples=48)
    program = programs.program(model=programs.batchnorm, train=data, test=data, optimizer=MOMENTUM)
    run = on_ray(program, "replicas=2 servers=3", steps=4, evaluate_every=1)
    one = on_ray(program, "replicas=2", steps=4, evaluate_every=1)
    oracle.assert_same(run.model, one.state, ROUNDING)
    assert [r.updates for r in run.history] == [r.updates for r in one.history] == [0, 1, 2, 3, 4]
    assert [r.test_loss for r in run.history] == pytest.approx([r.test_loss for r in one.history], rel=1e-9)


class Looking(Unsynchronized[int]):
    """Applies each Δ at a rate that its direction says."""

    needs = frozenset({"norm", "agreement"})

    def start(self, replicas: int) -> int:
        return 0

    def arrived(self, state: int, arrival: Arrival) -> tuple[int, Decision]:
        rate = 1.0 / (2.0 + arrival.observed["norm"] + arrival.observed["agreement"])
        return state + 1, (Apply(((arrival, 1.0),), rate), Release((arrival.replica,)))


@pytest.mark.parametrize("servers", [1, 2])
def test_norms_and_agreement_are_of_all_of_a_delta(on_ray: OnRay, servers: int) -> None:
    program = programs.program(optimizer=MOMENTUM)
    virtual = train(program, Strategy(replicas=1, aggregation=Looking()), engine="virtual", steps=6, progress=False)
    real = on_ray(program, Strategy(replicas=1, aggregation=Looking(), servers=servers), steps=6)
    oracle.assert_same(real.model, virtual.state, ROUNDING)


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("optimizer", [functools.partial(Adam, lr=0.01), functools.partial(Adagrad, lr=0.1)])
def test_they_go_on_from_what_any_number_has_saved(on_ray: OnRay, tmp_path: Path, optimizer: Any) -> None:
    program = programs.program(optimizer=optimizer)
    whole = on_ray(program, "replicas=2", steps=9)
    for before, after in ((2, 2), (3, 1), (1, 2)):
        saved = {"checkpoint": tmp_path / f"{before} {after}"}
        on_ray(program, f"replicas=2 servers={before}", steps=5, checkpoint_every="2 steps", **saved)
        resumed = on_ray(program, f"replicas=2 servers={after}", steps=9, resume=True, **saved)
        oracle.assert_same(resumed.model, whole.state, 0)
        newest_in(saved["checkpoint"])


def test_the_local_engine_goes_on_with_what_they_have_saved(
    on_ray: OnRay, local_engine: LocalEngine, tmp_path: Path
) -> None:
    program, settings = programs.program(**ADAM), {"engine": local_engine, "progress": False}
    on_ray(program, "replicas=2 servers=3", steps=4, checkpoint=tmp_path)
    resumed = train(program, "replicas=2", steps=8, checkpoint=tmp_path, resume=True, **settings)
    whole = train(program, "replicas=2", steps=8, **settings)
    oracle.assert_same(resumed.model, whole.state, 0)


# ------------------------------------------------------------------------------------------------------------ deaths


def test_a_replica_that_dies_is_replaced(on_ray: OnRay, tmp_path: Path) -> None:
    died = tmp_path / "died"

    def loop(worker: Any) -> None:
        for k, batch in enumerate(worker.batches()):
            if (worker.replica, k) == (1, 2) and not died.exists():
                died.touch()
                moments.die()
            worker.step(batch)

    assert_nothing_was_lost(on_ray, loop, "servers=2")


def test_the_others_go_on_without_one(on_ray: OnRay) -> None:
    loop = functools.partial(moments.loop, replica=1, step=3, prepare=moments.in_the_backward_pass)
    run = on_ray(programs.program(), "replicas=3 servers=2", steps=STEPS, loop=loop)
    assert [d.replica for d in run.left] == [1]
    oracle.assert_same(run.model, test_local_kills.without_one(STEPS, 1, after=2), ROUNDING)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_run_whose_server_has_died_names_it_and_is_resumed(
    on_ray: OnRay, engine: RayEngine, watched: list[Watcher], tmp_path: Path, number: int
) -> None:
    def kill() -> None:
        pool = engine._pool
        assert pool is not None
        os.kill(pool.locations[[pool.server, *pool.others][number]].pid, signal.SIGKILL)

    saved = lambda progress: training(progress) and any((tmp_path / "ckpt").glob("step-*"))  # noqa: E731
    watched.append(once(saved, kill))
    settings: dict[str, Any] = {"checkpoint": tmp_path / "ckpt", "checkpoint_every": "20 steps"}
    expected = f"server {number} died, and its slice of A with it" if number else "the server died, and A with it"
    with pytest.raises(WorkerError, match=expected):
        on_ray(programs.program(), "replicas=2 servers=3", steps=ENDLESS, **settings)
    steps = newest_in(tmp_path / "ckpt").manifest.head["version"] + 3
    run = on_ray(programs.program(), "replicas=2 servers=3", steps=steps, resume=True, **settings)
    assert run.summary["updates"] == steps


def test_ctrl_c_ends_training_with_what_there_is(on_ray: OnRay, watched: list[Watcher]) -> None:
    watched.append(once(training, lambda: os.kill(os.getpid(), signal.SIGINT)))
    run = on_ray(programs.program(), "replicas=2 servers=2", steps=ENDLESS)
    assert run.summary["interrupted"]
    assert run.history[-1].updates == run.summary["updates"]


class Wavering(Looking):
    """Decides by the process that it is in: all but the first to decide drop what that applies."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def arrived(self, state: int, arrival: Arrival) -> tuple[int, Decision]:
        with contextlib.suppress(FileExistsError), self.mark.open("x") as file:
            file.write(str(os.getpid()))
        if self.mark.read_text() == str(os.getpid()):
            return super().arrived(state, arrival)
        return state, (Discard((arrival,)), Release((arrival.replica,)))


def test_servers_that_decide_otherwise_end_the_run(on_ray: OnRay, tmp_path: Path) -> None:
    strategy = Strategy(replicas=2, servers=2, aggregation=Wavering(tmp_path / "mark"))
    with pytest.raises(WorkerError, match=r"server 1 .*it failed: .* a policy must decide by its arguments alone"):
        on_ray(programs.program(), strategy, steps=9)


# ------------------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("local", "A is not divided among servers; write servers=1, or engine='ray' or 'distributed'"),
        ("distributed", "under engine=distributed aggregation=synchronous every rank has A; leave servers out"),
    ],
)
def test_where_a_is_not_divided(engine: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        train(programs.program(), "replicas=2 servers=2", engine=engine, steps=1)


@pytest.mark.parametrize("servers", ["0", "-1", "two"])
def test_another_number_is_refused(servers: str) -> None:
    with pytest.raises(InputError, match="servers"):
        Strategy.parse(f"replicas=2 servers={servers}")
