"""A pipeline gives what one process gives that goes through the same micro-batches."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from paceline.core.errors import InputError, WorkerError
from paceline.replica.autograd import step_seed
from paceline.replica.base import Batch
from tests.replica.pipeline.hand_cuts import BORDERS, Chain, Norms, Skips, Tied, by_hand
from tests.replica.pipeline.pipeline_world import Alone, World, batches, build, program, same, squares

SCHEDULES = ["sequential", "gpipe", "1f1b", "zero-bubble", "interleaved:chunks=2"]
OPTIMIZERS = {"sgd": functools.partial(SGD, lr=0.1, momentum=0.9), "adam": functools.partial(Adam, lr=0.01)}
BUFFERS = tuple(
    f"{layer}.{name}"
    for layer in ("l0.1", "l1.1", "l2.2")
    for name in ("running_mean", "running_var", "num_batches_tracked")
)


def settings() -> list[Any]:
    """Every flushing schedule, number of workers and model; half of them with each optimizer."""
    found = []
    for kind in (Chain, Skips, Tied, Norms):
        for schedule in SCHEDULES:
            for workers in (1, 2, 3, 4):
                parts = workers * (2 if "interleaved" in schedule else 1)
                if parts <= 4 or kind is Skips:
                    optimizer = "adam" if (workers + len(schedule)) % 2 else "sgd"
                    found.append(
                        pytest.param(kind, schedule, workers, optimizer, id=f"{kind.__name__}-{schedule}-{workers}")
                    )
    return found


@pytest.mark.parametrize(("kind", "schedule", "workers", "optimizer"), settings())
def test_five_steps_equal_one_process(kind: type[nn.Module], schedule: str, workers: int, optimizer: str) -> None:
    job = program(kind, OPTIMIZERS[optimizer])
    m = 4 * workers // math.gcd(4, workers)
    buffers = BUFFERS if kind is Norms else ()
    world, alone = World(job, kind, schedule, workers, m, buffers=buffers), Alone(job, m)
    sizes = (2 * m, 2 * m, 2 * m + 3, 2 * m, 3 * m) if kind is Norms else (2 * m, 2 * m, m + 3, 3, 1)
    for batch in batches(kind, *sizes):
        measured = world.all(lambda member, batch=batch: member.step(batch))
        loss = alone.step(batch)
        same(world.gradients(), alone.values() | alone.gradients())
        same(world.values(), alone.values())
        assert [m.samples for m in measured] == [batch.samples] * workers
        assert sum(not math.isnan(m.loss) for m in measured) == 1
        assert next(m.loss for m in measured if not math.isnan(m.loss)) == pytest.approx(loss)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", ["boundaries", "all"])
@pytest.mark.parametrize("kind", [Skips, Norms])
def test_what_is_made_again_is_the_same(kind: type[nn.Module], recompute: str, schedule: str) -> None:
    job = program(kind, OPTIMIZERS["sgd"])
    workers = 1 if "interleaved" in schedule and kind is Norms else 2
    options = {"recompute": recompute}
    world = World(job, kind, schedule, workers, 4, options, buffers=BUFFERS if kind is Norms else ())
    alone = Alone(job, 4)
    for batch in batches(kind, 8, 8, 9, 8):
        world.all(lambda member, batch=batch: member.step(batch))
        alone.step(batch)
        same(world.gradients(), alone.values() | alone.gradients())
        same(world.values(), alone.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wire_on_which_sending_waits_is_no_danger(schedule: str) -> None:
    """Skips over all workers: a value goes from the first to the last, its gradient back."""
    job, workers = program(Skips), 4 if "interleaved" not in schedule else 3
    world, alone = World(job, Skips, schedule, workers, 12, rendezvous=True), Alone(job, 12)
    for batch in batches(Skips, 24, 24, 25):
        world.all(lambda member, batch=batch: member.step(batch))
        alone.step(batch)
    same(world.values(), alone.values())


@pytest.mark.parametrize("kind", [Skips, Tied])
def test_a_delta_of_several_batches(kind: type[nn.Module]) -> None:
    job = program(kind)
    world, alone = World(job, kind, "1f1b", 3, 4, {"micro_steps": 3}), Alone(job, 4)
    first, second = batches(kind, 9, 2)
    empty = Batch(first.input, first.target, 0)
    found = world.all(lambda member: member.gradient(first, empty, second))
    loss = alone.gradient(first, second)
    same(world.gradients(), alone.gradients())
    losses, measured = found[-1]
    assert measured.samples == 11
    assert measured.loss == pytest.approx(loss)
    assert math.isnan(losses[1])
    assert all(math.isnan(each) for each in found[0][0])


def test_no_sample_no_gradient() -> None:
    world = World(program(Tied), Tied, "gpipe", 3, 4)
    (batch,) = batches(Tied, 4)
    world.all(lambda member: member.gradient(batch))
    found = world.all(lambda member: member.gradient(Batch(batch.input, batch.target, 0)))
    assert all((m.samples, m.finite) == (0, True) and math.isnan(m.loss) for _, m in found)
    assert all(not value.any() for value in world.gradients().values())


def test_a_worker_sees_whether_its_own_part_is_finite() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.mean() * math.inf

    world = World(program(Chain, loss=loss), Chain, "1f1b", 2, 2)
    (batch,) = batches(Chain, 4)
    first, last = world.all(lambda member: member.step(batch))
    assert not first.finite
    assert not last.finite


def test_dropout_is_a_function_of_replica_clock_micro_batch_and_part() -> None:
    """In one worker, since threads share torch's generator; the masks are those that a hand-made loop draws."""
    job = program(Dropping)
    deltas = []
    for recompute in ("none", "boundaries", "all"):
        world = World(job, Dropping, "interleaved:chunks=2", 1, 3, {"recompute": recompute})
        (batch,) = batches(Dropping, 6)
        world.all(lambda member, batch=batch: member.gradient(batch))
        deltas.append(world.gradients())
        same(deltas[-1], deltas[0])
        world.all(lambda member, batch=batch: member.gradient(batch))
        assert not torch.equal(world.gradients()["l0.0.weight"], deltas[0]["l0.0.weight"])
    module = job.model()
    for i, start in enumerate((0, 2, 4)):
        x = batch.input[start : start + 2]
        for part, layers in enumerate((("l0", "l1"), ("l2", "l3"))):
            torch.manual_seed(step_seed(step_seed(5, 0, 0), part, i))
            for layer in layers:
                x = getattr(module, layer)(x)
        (squares(x, batch.target[start : start + 2]) / 3).backward()
    same(deltas[0], {name: p.grad for name, p in module.named_parameters()})


def test_bf16_is_as_in_one_process() -> None:
    """To a rounding of bf16 (2^-8) of gradients whose size is about 1: sums of m micro-batches are not reordered."""
    job = program(Chain, precision="bf16", model=lambda: build(Chain).float())
    for schedule in ("1f1b", "zero-bubble"):
        world, alone = World(job, Chain, schedule, 2, 2), Alone(job, 2)
        (wide,) = batches(Chain, 4)
        batch = wide._replace(input=wide.input.float())
        world.all(lambda member, batch=batch: member.gradient(batch))
        with job.autocast("cpu"):
            alone.gradient(batch)
        same(world.gradients(), alone.gradients(), 2**-8)
        assert world.gradients()["l0.0.weight"].dtype == torch.float32


def test_fewer_bytes_are_kept_where_they_are_made_again() -> None:
    (batch,) = batches(Chain, 16)

    def peaks(schedule: str, recompute: str, m: int) -> list[int]:
        world = World(program(Chain), Chain, schedule, 2, m, {"recompute": recompute})
        world.all(lambda member: member.gradient(batch))
        first = [member.replica.memory.peak_bytes for member in world.members]
        world.all(lambda member: member.gradient(batch))
        assert [member.replica.memory.peak_bytes for member in world.members] == first
        return first

    kept = peaks("gpipe", "none", 8)
    assert peaks("gpipe", "boundaries", 8)[1] < kept[1] / 2
    assert peaks("gpipe", "all", 8)[1] < kept[1]
    # Of 8 micro-batches 1f1b keeps 2 and 1 where gpipe keeps all.
    assert [full // few for full, few in zip(kept, peaks("1f1b", "none", 8), strict=True)] == [4, 8]


def test_spans_say_what_was_done_to_which_micro_batch() -> None:
    world = World(program(Chain), Chain, "1f1b", 2, 2, {"recompute": "boundaries"})
    (batch,) = batches(Chain, 2)
    world.all(lambda member: member.gradient(batch))
    first, last = ([(span[0], span[4]) for span in member.recorder.spans] for member in world.members)
    assert first == [
        ("forward", 0),
        ("send", 0),
        ("forward", 1),
        ("send", 1),
        ("recompute", 0),
        ("wait", 0),
        ("backward", 0),
        ("recompute", 1),
        ("wait", 1),
        ("backward", 1),
        ("wait", 0),  # until all sends have completed
    ]
    both = [(action, i) for i in (0, 1) for action in ("wait", "forward", "backward")]
    assert last == [*both, ("wait", 0)]  # it turns at once
    for member in world.members:
        times = [(span[2], span[3]) for span in member.recorder.spans]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times))
    moved = [span[5] for span in world.members[0].recorder.spans if span[0] == "send"]
    assert moved == [6 * 8, 6 * 8]


class Dropping(Chain):
    """Random, but for its first layer."""

    def __init__(self) -> None:
        super().__init__()
        for k in (1, 2, 3):
            setattr(self, f"l{k}", nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.4)))


class Failing(Chain):
    """Raises in one of its layers, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.l3 = nn.Sequential(nn.Linear(6, 6), Raises())


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("of its own")


BORDERS.update(dict.fromkeys((Dropping, Failing), BORDERS[Chain]))


def test_an_error_says_where_and_keeps_its_cause() -> None:
    world = World(program(Failing), Failing, "1f1b", 2, 4)
    (batch,) = batches(Failing, 4)
    with pytest.raises(WorkerError, match=r"stage 1, micro-batch 0, 1F0: ZeroDivisionError: of its own") as found:
        world.all(lambda member: member.step(batch))
    assert isinstance(found.value.__cause__, ZeroDivisionError)


class Changing(nn.Module):
    """What crosses depends on more than the input's shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.l0, self.l1, self.l2, self.l3 = (nn.Linear(6, 6) for _ in range(4))
        self.some = Some()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l3(self.l2(self.some(self.l1(self.l0(x))))).sum(0)


class Some(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times = getattr(self, "times", 0) + 1
        return x[: 1 + self.times % 2]


def test_what_crosses_may_not_change_without_the_input() -> None:
    job = program(Changing, loss=lambda output, _: output.square().mean())
    world = World(job, Changing, "gpipe", 2, 2, cutter=lambda: by_hand(build(Changing), ("l2",)))
    (batch,) = batches(Changing, 6)
    with pytest.raises(InputError, match=r"stage 0, micro-batch 1: some, .* stage 1, is torch.float64\[1, 6\] with"):
        world.all(lambda member: member.step(batch))


def test_a_batch_without_rows_is_not_cut() -> None:
    world = World(program(Chain), Chain, "gpipe", 2, 2)
    (batch,) = batches(Chain, 6)
    with pytest.raises(InputError, match=r"shapes \[\[6, 6\]\], none with 5 rows.*write micro_batches=1"):
        world.all(lambda member: member.step(Batch(batch.input, batch.target, 5)))
