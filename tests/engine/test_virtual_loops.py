"""Users' own loops in virtual time: the same training as train's, and whatever else a loop may do."""

import functools
import math
import threading
from typing import Any

import pytest
import torch

from paceline import InputError, NonFiniteError, Program, Run, WorkerError, launch, train
from tests import oracle
from tests.engine import programs

Loop = Any


def run(loop: Loop, strategy: str = "replicas=3", program: Program | None = None, **settings: Any) -> Run:
    return launch(loop, program or programs.program(), strategy, engine="virtual", progress=False, **settings)


def plain(worker: Any) -> None:
    for batch in worker.batches():
        worker.step(batch)


def asking(worker: Any) -> None:
    batches = worker.batches()
    while worker.going:
        worker.step(next(batches))


def careless(worker: Any) -> None:
    """Never asks whether training goes on."""
    batches = worker.batches()
    while True:
        worker.step(next(batches, None))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("loop", [plain, asking, careless])
@pytest.mark.parametrize("model", [programs.mlp, programs.dropout, programs.batchnorm])
@pytest.mark.parametrize(
    "strategy",
    [
        "replicas=3",
        "replicas=3 aggregation=asynchronous",
        "replicas=3 aggregation=buffered:k=2,hold=false",
        "replicas=2 accumulate=3",
        "replicas=2 aggregation=local-steps:period=2,over=asynchronous",
        "replicas=2 aggregation=elastic-averaging:period=3",
    ],
)
def test_a_loop_trains_as_train_does(strategy: str, model: Any, loop: Loop) -> None:
    program = programs.program(
        model=model, train=programs.data(samples=48), optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    )
    given: dict[str, Any] = {"steps": 6, "delay": "exponential:mean=0.05", "evaluate_every": 2}
    looped = run(loop, strategy, program, **given)
    trained = train(program, strategy, engine="virtual", progress=False, **given)
    # A loop's gradients are computed one at a time and others maybe in one vmap: the same products, summed elsewhere.
    oracle.assert_same(looped.model, trained.model.state_dict(), 1e-12)
    same = ("steps", "updates", "gradients", "seconds", "staleness", "utilisation")
    assert [looped.summary[k] for k in same] == [trained.summary[k] for k in same]
    assert [(r.time_s, r.updates) for r in looped.history] == [(r.time_s, r.updates) for r in trained.history]


@pytest.mark.parametrize(
    "strategy", ["replicas=2", "replicas=2 accumulate=2", "replicas=2 aggregation=local-steps:period=2"]
)
def test_step_returns_the_loss_of_its_own_batch(strategy: str) -> None:
    program, seen = programs.program(), []

    def loop(worker: Any) -> None:
        for batch in worker.batches():
            loss = worker.step(batch)
            seen.append((worker.replica, len(batch.target), loss))

    run(loop, strategy, program, steps=3)
    micro = 6 if "accumulate" in strategy else 3
    assert [r for r, _, _ in seen].count(0) == [r for r, _, _ in seen].count(1) == micro
    assert all(math.isfinite(loss) for _, _, loss in seen)
    first = oracle.Plain(program)
    for replica in (0, 1):
        indices = oracle.order(program, 2).batch(replica, 0)
        loss = program.loss(first.module(program.train[0][indices]), program.train[1][indices]).item()
        assert next(x for r, _, x in seen if r == replica) == pytest.approx(loss, rel=1e-12)


def test_a_replica_whose_loop_ends_early_leaves_and_the_others_go_on() -> None:
    def loop(worker: Any) -> None:
        for k, batch in enumerate(worker.batches()):
            if worker.replica == 1 and k == 2:
                return
            worker.step(batch)

    summary = run(loop, steps=5).summary
    assert (summary["updates"], summary["gradients"], summary["steps"]) == (5, 5 + 2 + 5, 5)


def test_a_loop_that_ends_within_an_accumulated_delta_takes_no_half_of_it_along() -> None:
    def loop(worker: Any) -> None:
        for k, batch in enumerate(worker.batches()):
            if k == 3:
                return
            worker.step(batch)

    assert run(loop, "replicas=2 accumulate=2", steps=5).summary["gradients"] == 2


def test_a_loop_that_does_nothing() -> None:
    trained = run(lambda worker: None, steps=5)
    assert trained.summary["updates"] == 0
    oracle.assert_same(trained.model, oracle.Plain(programs.program()).values(), 0.0)


def test_batches_of_ones_own() -> None:
    """Of any size: their weight in a mean is their number of samples."""
    program = programs.program()
    inputs, targets = program.train
    sizes = [4, 7]

    def loop(worker: Any) -> None:
        start = sum(sizes[: worker.replica])
        mine = slice(start, start + sizes[worker.replica])
        while worker.going:
            worker.step((inputs[mine], targets[mine]))

    expected = oracle.Plain(program)
    for _ in range(3):
        expected.step(expected.gradient(range(11)))
    trained = run(loop, "replicas=2", program, steps=3)
    oracle.assert_same(trained.model, expected.values(), 1e-12)


def test_loops_take_turns() -> None:
    """Only one runs at a time, so that what they share needs no lock."""
    order: list[int] = []

    def loop(worker: Any) -> None:
        order.append(worker.replica)
        plain(worker)
        order.append(worker.replica)

    run(loop, steps=2)
    assert order == [0, 1, 2, 0, 1, 2]


def test_what_a_loop_raises_ends_the_run_and_names_its_replica() -> None:
    def loop(worker: Any) -> None:
        for k, batch in enumerate(worker.batches()):
            if worker.replica == 2 and k == 3:
                raise KeyError("lost")
            worker.step(batch)

    with pytest.raises(WorkerError, match="the loop of replica 2 raised KeyError: 'lost'") as caught:
        run(loop, steps=5)
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_first_failure_wins() -> None:
    def loop(worker: Any) -> None:
        try:
            plain(worker)
        finally:
            raise ValueError(f"also replica {worker.replica}")

    with pytest.raises(WorkerError, match="the loop of replica 0 raised ValueError: also replica 0"):
        run(loop, steps=1)


def test_a_loop_may_clean_up_after_the_end() -> None:
    ended: list[int] = []

    def loop(worker: Any) -> None:
        try:
            careless(worker)
        finally:
            ended.append(worker.replica)

    run(loop, seconds=0.105)
    assert sorted(ended) == [0, 1, 2]


def test_a_loss_that_is_no_number_in_a_loop() -> None:
    def loop(worker: Any) -> None:
        for inputs, targets, _ in worker.batches():
            worker.step((inputs * math.nan, targets))

    with pytest.raises(NonFiniteError, match="replica 0 at its step 1"):
        run(loop, steps=2)
    assert run(loop, steps=2, on_nonfinite="skip").summary["nonfinite"] == 6


def test_a_loop_makes_one_pass_where_no_budget_is_given() -> None:
    assert run(plain, "replicas=2").summary["updates"] == 7


def test_the_start_is_that_of_a_run_without_a_loop() -> None:
    """Though a loop's run has in its state what the loop's optimizer says."""
    trained = train(programs.program(), "replicas=3", engine="virtual", steps=1, progress=False)
    assert run(plain, steps=1).summary["start_digest"] == trained.summary["start_digest"]


def test_what_is_no_loop() -> None:
    with pytest.raises(InputError, match=r"loop=3 can't be called; write launch\(loop, program, strategy\)"):
        run(3, steps=1)
    with pytest.raises(InputError, match=r"loop=3 can't be called"):
        train(programs.program(), engine="virtual", loop=3, steps=1)


async def later(worker: Any) -> None:
    plain(worker)


def yielding(worker: Any) -> Any:
    for batch in worker.batches():
        yield worker.step(batch)


class Yielding:
    def __call__(self, worker: Any) -> Any:
        return (yield from yielding(worker))


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (later, "loop=later is an async function: to call it runs nothing of it; write def loop"),
        (yielding, "loop=yielding is a generator: .* write worker.log"),
        (functools.partial(yielding), "loop=partial is a generator"),
        (Yielding(), "loop=Yielding is a generator"),
    ],
)
def test_a_loop_that_is_called_in_vain_is_refused(loop: Loop, says: str) -> None:
    with pytest.raises(InputError, match=says):
        run(loop, steps=1)


def test_loops_do_not_read_one_iterator() -> None:
    """Each would lose the batches that the other takes; what a loop makes itself, or one loop alone has, is its own."""
    samples = [torch.full((1, 6), float(i), dtype=torch.float64) for i in range(4)]
    program = Program(model=programs.mlp, optimizer=functools.partial(torch.optim.SGD, lr=0.1))

    def reading(worker: Any, batches: Any) -> None:
        for batch in worker.data(batches):
            worker.optimizer.zero_grad()
            worker.model(batch).square().sum().backward()
            worker.optimizer.step()

    given = iter(samples)
    with pytest.raises(WorkerError, match=r"worker\.data\(list_iterator\) can be read once, .* replicas 0 and 1"):
        run(lambda worker: reading(worker, given), "replicas=2", program)
    assert run(lambda worker: reading(worker, iter(samples)), "replicas=2", program).summary["gradients"] == 4
    given = iter(samples)
    assert run(lambda worker: reading(worker, given), "replicas=1", program).summary["gradients"] == 4


def test_figures_that_are_no_numbers_are_named() -> None:
    for value in ("text", None, torch.zeros(2)):
        with pytest.raises(WorkerError, match=r"worker\.log\(\{'a': …\}\) is .*, no number; write"):
            run(lambda worker, value=value: worker.log({"a": value}), steps=1)


def test_what_is_no_batch() -> None:
    with pytest.raises(
        WorkerError, match=r"replica 0 raised InputError: a batch must be \(input, target\), but is int"
    ):
        run(lambda worker: worker.step(5), steps=1)
