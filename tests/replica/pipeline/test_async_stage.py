"""PipeDream and 2BW against a process that keeps all versions of the weights; what they keep themselves."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.mesh import StageReplicas
from paceline.replica.base import Batch
from paceline.replica.pipeline.comm_plan import CommPlan, ScheduledAction
from paceline.schedule import in_flight, parse
from tests.replica.pipeline.hand_cuts import Chain, Norms
from tests.replica.pipeline.pipeline_world import batches, program, same
from tests.replica.pipeline.stream_world import Passing, Stream, Versioned

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)

ROUNDING = 1e-12
"""Both add up the same float64 numbers, of size about 1, in another order, over ten updates."""


def of_stage(workers: int) -> Callable[[int], int]:
    """Stage j uses weights p - 1 - j updates old (Narayanan et al. 2019, section 3.3)."""
    return lambda worker: workers - 1 - worker


def two_versions(worker: int) -> int:
    """All stages use weights that are one update old (Narayanan et al. 2020, section 3.1)."""
    del worker
    return 1


def compare(stream: Stream, stale: Callable[[int], int], data: list[Batch], bound: float = ROUNDING) -> None:
    """Every worker's weights after each step, its buffers at the end, and all losses."""
    reference = Versioned(stream.program, stream.holder(), stale)
    losses = [reference.step(batch, stream.micro_batches) for batch in data]
    found = stream.run(data)
    assert [loss for loss, _ in found[-1]] == pytest.approx(losses, rel=1e-11)  # sums of other sums
    assert all(math.isnan(loss) for steps in found[:-1] for loss, _ in steps)
    for steps in found:
        assert [(m.samples, m.finite) for _, m in steps] == [(batch.samples, True) for batch in data]
    for worker, member in enumerate(stream.members):
        made = [updates for updates, _ in member.seen]
        behind = stream.workers - 1 - worker
        if stream.micro_batches == 1:
            assert made == [max(0, t + 1 - behind) for t in range(len(data))] + [len(data)]
        assert made[-1] == len(data)
        for updates, weights in member.seen:
            same(weights, reference.history[updates], bound)
        same(member.buffers(), dict(reference.module.named_buffers()), bound)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [Chain, Passing, Norms])
def test_pipedream_is_what_its_formula_says(kind: type[nn.Module], workers: int, optimizer: Any) -> None:
    stream = Stream(program(kind, optimizer), kind, "pipedream", workers)
    compare(stream, of_stage(workers), batches(kind, 4, 4, 4, 3, 4, 4, 4, 4, 2, 4))
    assert [member.replica.staleness for member in stream.members] == [workers - 1 - w for w in range(workers)]
    assert all(member.replica.stash.most <= workers - w for w, member in enumerate(stream.members))


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize(("workers", "m"), [(1, 1), (1, 3), (2, 2), (2, 5), (3, 4), (4, 4)])
@pytest.mark.parametrize("kind", [Chain, Passing, Norms])
def test_two_versions_are_what_their_formula_says(kind: type[nn.Module], workers: int, m: int, optimizer: Any) -> None:
    """A batch may have too few samples for m micro-batches, but for BatchNorm, which needs two in each."""
    counts = (2 * m, 2 * m + 1, 2 * m, 2 * m) if kind is Norms else (9, 9, max(1, m - 2), 7, m, 9)
    stream = Stream(program(kind, optimizer), kind, "pipedream-2bw", workers, m)
    compare(stream, two_versions, batches(kind, *counts))
    assert [member.replica.staleness for member in stream.members] == [1] * workers
    assert all(member.replica.stash.most == 2 for member in stream.members)


@pytest.mark.parametrize("recompute", ["boundaries", "all"])
@pytest.mark.parametrize("kind", [Chain, Norms])
def test_a_forward_pass_that_is_made_again_uses_the_weights_of_the_first(kind: type[nn.Module], recompute: str) -> None:
    stream = Stream(program(kind, MOMENTUM), kind, "pipedream", 3, options={"recompute": recompute})
    compare(stream, of_stage(3), batches(kind, 4, 4, 4, 3, 4, 4))


def grouped(parameters: Any) -> torch.optim.SGD:
    """Treats parameters by their place among all of the model's."""
    parameters = list(parameters)
    groups = [{"params": parameters[:5]}, {"params": parameters[5:], "lr": 0.02, "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def test_groups_and_schedulers_are_those_of_the_whole_model() -> None:
    halving = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    stream = Stream(program(Chain, grouped, scheduler=halving), Chain, "pipedream", 3)
    compare(stream, of_stage(3), batches(Chain, 4, 4, 4, 3, 4, 4))


def test_a_stream_that_ends_before_it_is_full() -> None:
    for count in range(1, 4):
        stream = Stream(program(Chain, MOMENTUM), Chain, "pipedream", 4)
        compare(stream, of_stage(4), batches(Chain, *[4] * count))


def test_a_batch_without_samples_is_no_step() -> None:
    data = batches(Chain, 4, 4, 4, 4)
    empty = Batch(data[0].input, data[0].target, 0)
    stream = Stream(program(Chain, MOMENTUM), Chain, "pipedream", 2)
    found = stream.run([data[0], empty, *data[1:]])
    assert all(math.isnan(steps[1][0]) and steps[1][1].samples == 0 for steps in found)
    reference = Versioned(stream.program, stream.holder(), of_stage(2))
    for batch in data:
        reference.step(batch, 1)
    for member in stream.members:
        same(member.seen[-1][1], reference.history[-1], ROUNDING)


def test_as_many_activations_as_the_schedule_says() -> None:
    """Of saved bytes: each micro-batch keeps as much as any other."""
    most: dict[str, list[int]] = {}
    for schedule, m in (("pipedream", 1), ("pipedream-2bw", 4)):
        stream = Stream(program(Chain, MOMENTUM), Chain, schedule, 4, m)
        stream.run(batches(Chain, *[2 * m] * 8))
        most[schedule] = [member.replica.memory.peak_bytes for member in stream.members]
    one = Stream(program(Chain, MOMENTUM), Chain, "pipedream", 4)
    one.run(batches(Chain, 2))
    each = [member.replica.memory.peak_bytes for member in one.members]
    expected = [in_flight(parse("pipedream"), worker, 4, 8) for worker in range(4)]
    assert expected == [4, 3, 2, 1]
    counted = [count * size for count, size in zip(expected, each, strict=True)]
    assert most == {"pipedream": counted, "pipedream-2bw": counted}


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_the_worker_with_a_gradient_that_is_not_finite_reports_it(where: str) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean = output.mean()
        return mean * math.inf if where == "loss" else mean.abs().detach() + 0 * (mean - mean.detach()).sqrt()

    stream = Stream(program(Chain, MOMENTUM, loss=loss), Chain, "pipedream", 2)
    (batch,) = batches(Chain, 4)
    first, last = stream.all(lambda member: (member.step(batch)[1].finite, member.drain()))
    assert first == (True, False)
    assert last == (False, True)


def test_spans_name_micro_batches_of_the_stream() -> None:
    stream = Stream(program(Chain, MOMENTUM), Chain, "pipedream", 2)
    stream.run(batches(Chain, 4, 4, 4))
    for worker, member in enumerate(stream.members):
        found = [(s[0], s[4]) for s in member.recorder.spans if s[0] in ("forward", "backward", "apply")]
        names = {"forward": "forward", "backward": "backward", "update": "apply"}
        assert found == [(names[a.kind], a.micro_batch) for a in parse("pipedream").actions(worker, 2, 3)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("schedule", "m"), [("pipedream", 1), ("pipedream-2bw", 6)])
def test_the_endless_program_begins_as_that_of_a_long_stream(schedule: str, m: int, workers: int) -> None:
    """Action by action, until the long one's end is near; and no message is forgotten or told of twice."""
    value = parse(schedule).resolved(m)
    plan = CommPlan(value, StageReplicas((1,) * workers), m, (), {})
    for worker in range(workers):
        endless: list[ScheduledAction] = list(itertools.islice(plan.actions(worker), 150))
        expected = list(itertools.islice(value.actions(worker, workers, 500), 150))
        assert [step.action for step in endless] == expected
