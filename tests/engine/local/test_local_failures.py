"""What users' own code raises in another process reaches the caller with its traceback; nothing is left of the run."""

import functools
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import InputError, NonFiniteError, Program, Run, WorkerError
from tests.engine import programs
from tests.engine.local import moments

Local = Callable[..., Run]

MAIN = moments.here()


class BrokenError(RuntimeError):
    """What these programs raise."""


def elsewhere(main: int, text: str = "it broke") -> None:
    """Main makes one trial step itself, before anything is started: that one may succeed."""
    if os.getpid() != main:
        raise BrokenError(text)


class BrokenModel(nn.Module):
    def __init__(self, main: int) -> None:
        super().__init__()
        self.main, self.inner = main, programs.mlp()

    def forward(self, x: Tensor) -> Tensor:
        elsewhere(self.main)
        return self.inner(x)


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, main: int) -> Tensor:
        ctx.main = main
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        elsewhere(ctx.main)
        return gradient, None


class BrokenData(Dataset[Any]):
    def __init__(self, main: int) -> None:
        self.main = main

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        elsewhere(self.main)
        return torch.zeros(6, dtype=torch.float64), 0


def model() -> Program:
    main = MAIN
    return programs.program(model=lambda: BrokenModel(main))


def building() -> Program:
    main = MAIN

    def build() -> nn.Module:
        elsewhere(main)
        return programs.mlp()

    return programs.program(model=build)


def loss() -> Program:
    main = MAIN

    def broken(output: Tensor, target: Tensor) -> Tensor:
        elsewhere(main)
        return nn.functional.cross_entropy(output, target)

    return programs.program(loss=broken)


def backward() -> Program:
    main = MAIN
    return programs.program(
        loss=lambda output, target: BrokenBackward.apply(nn.functional.cross_entropy(output, target), main)
    )


def data() -> Program:
    return programs.program(train=BrokenData(MAIN))


def collate() -> Program:
    main = MAIN

    def broken(samples: list[Any]) -> Any:
        elsewhere(main)
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    return programs.program(loader={"collate_fn": broken})


def fetched_ahead() -> Program:
    return programs.program(train=BrokenData(MAIN), loader={"num_workers": 1})


def source() -> Program:
    main = MAIN

    def batches(replica: int, replicas: int, seed: int) -> Any:
        inputs, targets = programs.data()
        yield inputs[:4], targets[:4]
        elsewhere(main)

    return programs.program(train=batches)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("make", [model, building, loss, backward, data, collate, fetched_ahead, source])
def test_a_workers_own_traceback_reaches_the_caller(local: Local, make: Callable[[], Program]) -> None:
    with pytest.raises(WorkerError, match=r"(?s)(replica [01]|the scorer) failed: .*BrokenError: it broke") as failure:
        local(make(), "replicas=2", steps=5)
    text = str(failure.value)
    assert "Traceback (most recent call last)" in text
    assert "raise BrokenError(text)" in text


def test_the_loops_too(local: Local) -> None:
    def loop(worker: Any) -> None:
        for k, batch in enumerate(worker.batches()):
            worker.step(batch)
            if worker.replica == 1 and k == 3:
                raise KeyError("no such thing")

    with pytest.raises(WorkerError, match="replica 1 failed: KeyError: 'no such thing'"):
        local(programs.program(), "replicas=3", steps=10, loop=loop)


def test_a_loop_that_raises_when_training_has_ended(local: Local) -> None:
    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)
        raise ValueError(f"at the end of {worker.replica}")

    # Sixteen at once: more than the kernel queues for one reader.
    with pytest.raises(WorkerError, match=r"replica \d+ failed: ValueError: at the end of"):
        local(programs.program(), "replicas=16", steps=2, loop=loop)


@pytest.mark.parametrize("text", ["Δ" * 100_000, "\udc80", "\0", ""], ids=["long", "surrogate", "nul", "empty"])
def test_whatever_an_error_says(local: Local, text: str) -> None:
    def loop(worker: Any) -> None:
        raise BrokenError(text)

    with pytest.raises(WorkerError, match=r"replica 0 failed: .*BrokenError"):
        local(programs.program(), "replicas=1", steps=2, loop=loop)


def test_an_error_that_cannot_be_printed(local: Local) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def loop(worker: Any) -> None:
        raise MuteError

    with pytest.raises(WorkerError, match=r"replica 0 failed: .*MuteError"):
        local(programs.program(), "replicas=1", steps=2, loop=loop)


@pytest.mark.parametrize("leave", [SystemExit(0), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_leaving_by_an_exception_is_a_failure(local: Local, leave: BaseException) -> None:
    def loop(worker: Any) -> None:
        raise leave

    with pytest.raises(WorkerError, match=f"replica 0 failed: {type(leave).__name__}"):
        local(programs.program(), "replicas=1", steps=2, loop=loop)


def test_the_first_failure_wins(local: Local) -> None:
    """Replica 1 waits until replica 0 has failed, and fails of that."""

    def loop(worker: Any) -> None:
        if worker.replica == 0:
            raise BrokenError("the cause")
        for batch in worker.batches():
            worker.step(batch)
        raise BrokenError("a consequence")

    with pytest.raises(WorkerError, match=r"replica 0 failed: .*BrokenError: the cause"):
        local(programs.program(), "replicas=3", steps=10, loop=loop)


def test_scoring(local: Local) -> None:
    main = MAIN

    def metric(output: Tensor, target: Tensor) -> float:
        elsewhere(main, "no score")
        return 0.0

    program = programs.program(test=programs.data(), metrics={"mine": metric})
    with pytest.raises(WorkerError, match="BrokenError: no score"):
        local(program, "replicas=2", steps=3)


@pytest.mark.usefixtures("two_threads")
def test_what_cannot_be_sent_is_refused_and_leaves_nothing(local: Local) -> None:
    lock, threads, counts = threading.Lock(), torch.get_num_threads(), []
    for _ in range(4):
        with pytest.raises(InputError, match="can't be sent to another process"):
            local(programs.program(), "replicas=2", steps=2, loop=lambda worker: lock)
        gc.collect()  # what tests before have left in cycles
        counts.append(len(os.listdir("/proc/self/fd")))
    assert len(set(counts)) == 1  # none is before the fork server has started
    assert torch.get_num_threads() == threads


# ------------------------------------------------------------------------------------------- Δs that are not finite


def poisoned(replica: int, step: int) -> Callable[[Any], None]:
    """A loop in which one replica has one batch with a NaN in it."""

    def loop(worker: Any) -> None:
        for made, (inputs, targets, _) in enumerate(worker.batches()):
            inputs = inputs.clone()
            if (worker.replica, made + 1) == (replica, step):
                inputs[0, 0] = float("nan")
            worker.step((inputs, targets))

    return loop


@pytest.mark.parametrize("policy", ["synchronous", "asynchronous", "local-steps:period=1", "hogwild"])
def test_a_delta_that_is_not_finite_stops_the_run(local: Local, policy: str) -> None:
    with pytest.raises(NonFiniteError, match="the Δ of replica 1 at its step 3 is not finite"):
        local(programs.program(), f"replicas=2 aggregation={policy}", steps=5, loop=poisoned(1, 3))


@pytest.mark.parametrize(
    "policy", ["synchronous", "asynchronous", "buffered:k=2,hold=false", "local-steps:period=1", "hogwild"]
)
def test_or_is_discarded_and_counted(local: Local, policy: str) -> None:
    run = local(
        programs.program(), f"replicas=2 aggregation={policy}", steps=5, loop=poisoned(1, 3), on_nonfinite="skip"
    )
    assert run.summary["nonfinite"] == 1
    assert run.summary["discarded"] >= 1
    assert run.summary["gradients"] == 10
    assert all(torch.isfinite(value).all() for value in run.state.values())


EVEN = programs.program(train=programs.data(samples=48), optimizer=functools.partial(torch.optim.Adam, lr=0.01))
"""3 and 4 replicas have batches without an empty one."""


@pytest.mark.parametrize("bad", [0, 3])
def test_under_hogwild_it_is_named_by_the_replica_that_had_it(local: Local, bad: int) -> None:
    """A that had it would give it to all of them at once."""
    for step in (2, 9, 17):
        with pytest.raises(NonFiniteError, match=f"the Δ of replica {bad} at its step {step} is not finite"):
            local(EVEN, "replicas=4 aggregation=hogwild", steps=20, loop=poisoned(bad, step))


def test_under_hogwild_a_stays_finite_however_often_it_is_refused(local: Local) -> None:
    def loop(worker: Any) -> None:
        for made, (inputs, targets, _) in enumerate(worker.batches()):
            worker.step((inputs * float("inf") if worker.replica == 1 and made % 3 == 0 else inputs, targets))

    run = local(EVEN, "replicas=3 aggregation=hogwild", steps=30, loop=loop, on_nonfinite="skip")
    assert run.summary["nonfinite"] == run.summary["discarded"] == 10
    assert run.summary["updates"] == run.summary["applied"] == 80
    assert all(torch.isfinite(value).all() for value in run.state.values())
