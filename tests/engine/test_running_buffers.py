"""Buffers of any dtype that forward writes end as in a plain loop, under one replica, stages and shards."""

import functools
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Program, train
from paceline.engine.local.engine import LocalEngine

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
BATCH, STEPS = 8, 12
RUNS = [
    ("virtual", "replicas=1"),
    ("local", "replicas=1"),
    ("local", "stages=2 micro_batches=1"),
    ("local", "shards=2"),
]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * BATCH, 6, generator=generator)
    x[:BATCH] = x[:BATCH].clamp(max=1)  # what is seen later is not in the first batch
    return x, torch.randint(3, (STEPS * BATCH,), generator=generator)


class Writes(nn.Module):
    """Has a buffer that forward writes, and that its output depends on."""

    start: ClassVar[Callable[[], Tensor]]
    persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 10), nn.Linear(10, 3)
        self.register_buffer("seen", type(self).start(), persistent=self.persistent)
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.write(x)
        seen = self.seen.abs() if self.seen.is_complex() else self.seen
        y: Tensor = self.out(torch.tanh(self.hidden(x)) * (1 + 0.01 * seen.float().mean()))
        return y

    def write(self, x: Tensor) -> None:
        raise NotImplementedError


class Spectrum(Writes):
    start = functools.partial(torch.zeros, 6, dtype=torch.complex64)

    def write(self, x: Tensor) -> None:
        self.seen.mul_(0.9).add_(torch.fft.fft(x.mean(0)), alpha=0.1)


class Seen(Writes):
    """Is written with what it was in the first step."""

    start = functools.partial(torch.zeros, 6, dtype=torch.int32)

    def write(self, x: Tensor) -> None:
        self.seen.bitwise_or_((x.amax(0) > 2).int())


class Flags(Writes):
    start = functools.partial(torch.zeros, 6, dtype=torch.bool)

    def write(self, x: Tensor) -> None:
        self.seen.logical_or_(x.amax(0) > 2)


class Pointer(Writes):
    """Goes round: it is less than before every fourth step."""

    start = functools.partial(torch.zeros, (), dtype=torch.int64)

    def write(self, x: Tensor) -> None:
        self.seen.copy_((self.seen + 1) % 4)


class Temporary(Writes):
    start = functools.partial(torch.zeros, 6)
    persistent = False

    def write(self, x: Tensor) -> None:
        self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)


KINDS = [Spectrum, Seen, Flags, Pointer, Temporary]


def program(kind: type[Writes]) -> Program:
    return Program(kind, F.cross_entropy, SGD, data(), global_batch_size=BATCH, shuffle=False, name="buffers")


def plain(kind: type[Writes]) -> nn.Module:
    model, (x, y) = program(kind).build().train(), data()
    optimizer = SGD(model.parameters())
    for own_x, own_y in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(own_x), own_y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("which", "strategy"), RUNS)
def test_they_are_a_plain_loops(
    engines: dict[str, str | LocalEngine], kind: type[Writes], which: str, strategy: str
) -> None:
    run = train(program(kind), strategy, engine=engines[which], steps=STEPS, progress=False)
    expected, found = plain(kind), run.model
    torch.testing.assert_close(found.get_buffer("seen"), expected.get_buffer("seen"), rtol=1e-5, atol=1e-6)
    for name, parameter in expected.named_parameters():  # float32, whose sums may be in another order
        torch.testing.assert_close(found.get_parameter(name), parameter, rtol=1e-5, atol=1e-6)
    assert ("seen" in run.state) == kind.persistent


@pytest.mark.parametrize("kind", [Seen, Flags])
def test_what_any_replica_has_seen_is_seen(engine: LocalEngine, kind: type[Writes]) -> None:
    run = train(program(kind), "replicas=2", engine=engine, steps=STEPS, progress=False)
    assert torch.equal(run.state["seen"], plain(kind).get_buffer("seen"))
    assert run.state["seen"].any()
