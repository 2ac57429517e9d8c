"""Paceline's side: the distributed engine, with a loop that others may step beside; and its shards without messages."""

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from bare import Bare, Silent
from models import SEED, Loss, Row
from sides import OPTIMIZER, Side
from torch import Tensor

import paceline
from paceline.replica.base import Batch
from paceline.replica.capture.capture import capture
from paceline.replica.tensor.prepare import agreed_op_times, plan_captured, prepare_shard
from paceline.replica.tensor.rewrite import rewrite_for_shard
from paceline.replica.tensor.shard_forward import ShardForward
from paceline.replica.tensor.sharding_plan import NO_RULES
from paceline.replica.tensor.short_steps import ShortSteps

Step: TypeAlias = Callable[[], None]


def trained(row: Row, backend: str, steps: int, loop: Callable[[Step, Step], None]) -> paceline.Run:
    """A run of as many shards as there are ranks.

    Args:
        row: what is trained.
        backend: carries what is sent.
        steps: that ``loop`` makes.
        loop: is given a step, and the forward pass of one sample.
    """
    program = _program(row)

    def stepped(worker: Any) -> None:
        batch = next(worker.batches())  # the same again and again, as on the other sides
        loop(lambda: worker.step(batch), forward)

    forward = _forward(row, backend)
    return paceline.launch(
        stepped, program, f"shards={dist.get_world_size()} threads=1", engine=f"distributed:{backend}", steps=steps,
        evaluate_every=10**6, progress=False,
    )  # fmt: skip


def _program(row: Row) -> paceline.Program:
    return paceline.Program(
        model=row.make,
        loss=Loss,
        optimizer=OPTIMIZER,
        train=lambda replica, replicas, seed: itertools.repeat(row.batch()),
        batch_size=row.shape[0],
        seed=SEED,
    )


class Unsent(Side):
    """The shards' own steps in a plain loop, where collectives send nothing: no step with this plan takes less.

    Args:
        row: what is trained.
    """

    def __init__(self, row: Row) -> None:
        self._x, self._y = row.batch()
        silent, says = Silent(dist.get_rank(), dist.get_world_size()), Bare(dist.new_group(backend="shm")).says
        batch = Batch(self._x, self._y, len(self._x))
        prepared = prepare_shard(_program(row), row.built(), batch, silent, says, check=False)
        self._module = prepared.shard.module.train()
        self._leaves = prepared.captured.input_spec.flatten((self._x, self._y))
        self._short = ShortSteps(self._module, silent, nullcontext, nullcontext)
        self._optimizer = OPTIMIZER(self._module.parameters())

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._short.differentiate(self._leaves, 1.0, self._plain)
        self._optimizer.step()

    def _plain(self) -> tuple[Tensor, int]:
        (loss,) = self._module(*self._leaves)
        turned = time.monotonic_ns()
        loss.backward()
        return loss, turned

    @torch.no_grad()
    def forward(self) -> None:
        self._module(self._x[:1], self._y[:1])

    def state(self) -> dict[str, Tensor]:
        raise NotImplementedError("it does not compute what the model does")


def _forward(row: Row, backend: str) -> Step:
    """The forward pass of one sample, as a predictor makes it."""
    (inputs, _), module, shards = row.batch(), row.built(), Bare(dist.new_group(backend=backend))
    captured = capture(module, inputs, operators=True, training=False)
    leaves = captured.flatten(inputs)
    times = agreed_op_times(captured, leaves, shards.says)
    plan = plan_captured(captured, leaves, shards.count, NO_RULES, times, row.make.__name__)
    passes = ShardForward(captured, rewrite_for_shard(plan, shards), module.eval(), shards.says, shards.rank)
    sample = inputs[:1]

    @torch.no_grad()
    def forward() -> None:
        passes(sample)

    return forward
