"""A whole pipeline in threads, and the one process that it has to equal."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline import Program
from paceline.core.mesh import StageReplica, StageReplicas
from paceline.program import call, map_tree
from paceline.replica.base import Batch, Measured
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.replica.pipeline.comm_plan import CommPlan, PipelineContext
from paceline.replica.pipeline.cut import Cut
from paceline.replica.pipeline.micro_batches import micro_batch_sizes
from paceline.replica.pipeline.p2p_queue import StageReplicaGroup
from paceline.replica.pipeline.pipelined import Pipelined
from paceline.replica.pipeline.stage_runtime import merged_module
from paceline.schedule import parse
from paceline.trace.recorder import NullRecorder
from tests.replica.pipeline.hand_cuts import BORDERS, by_hand
from tests.replica.pipeline.thread_p2p import Hub, Table, Turns, in_threads

torch.set_num_threads(1)

Values = dict[str, Tensor]

ROUNDING = 1e-12
"""Both add up the same float64 numbers, of size about 1, in another order; five steps let that grow a little."""


def squares(output: Any, target: Tensor) -> Tensor:
    """The mean over samples of a loss that takes every output into account."""
    outputs = output if isinstance(output, tuple) else (output,)
    return sum(
        ((each - target.to(each.dtype).view(len(each), -1)[:, :1]).square().mean() for each in outputs), torch.zeros(())
    )


def build(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind().double().train()


def program(kind: type[nn.Module], optimizer: Callable[[Any], Any] | None = None, **fields: Any) -> Program:
    make = optimizer or functools.partial(torch.optim.SGD, lr=0.1)
    data = (torch.zeros(1, 1), torch.zeros(1))
    return Program(
        fields.pop("model", lambda: build(kind)), fields.pop("loss", squares), make, train=data, seed=5, **fields
    )


def batches(kind: type[nn.Module], *counts: int) -> list[Batch]:
    """Random ones, with so many samples."""
    generator = torch.Generator().manual_seed(1)
    return [Batch(_input(kind.__name__, n, generator), torch.randn(n, generator=generator), n) for n in counts]


def _input(name: str, n: int, generator: torch.Generator) -> Any:
    if name == "Tied":
        return torch.randint(11, (n, 3), generator=generator)
    if name == "Norms":
        return torch.randn(n, 1, 5, 5, dtype=torch.float64, generator=generator)
    x = torch.randn(n, 6, dtype=torch.float64, generator=generator)
    return (x, torch.randn(n, 6, dtype=torch.float64, generator=generator)) if name == "Skips" else x


def rows(tree: Any, start: int, stop: int) -> Any:
    return map_tree(lambda tensor: tensor[start:stop], tree)


@dataclass
class Alone:
    """One process that goes through the same micro-batches."""

    program: Program
    micro_batches: int

    def __post_init__(self) -> None:
        self.module = self.program.model()
        self.optimizer = self.program.optimizer(self.module.parameters())

    def gradient(self, *accumulated: Batch) -> float:
        """Leave the gradient of the mean loss over some batches in ``grad``; returns the loss."""
        self.optimizer.zero_grad()
        total, samples = 0.0, sum(batch.samples for batch in accumulated)
        for batch in accumulated:
            start = 0
            for count in micro_batch_sizes(batch.samples, self.micro_batches):
                stop = start + count
                output = call(self.module, rows(batch.input, start, stop))
                loss = self.program.loss(output, rows(batch.target, start, stop)) * (count / samples)
                loss.backward()
                total, start = total + float(loss.detach()), stop
        return total

    def step(self, *accumulated: Batch) -> float:
        loss = self.gradient(*accumulated)
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        return loss

    def values(self) -> Values:
        named = (*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers())
        return {name: value.detach().clone() for name, value in named}

    def gradients(self) -> Values:
        found = self.module.named_parameters(remove_duplicate=False)
        return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in found}


class Recording(NullRecorder):
    """Keeps all spans."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[Any, ...]] = []

    def record(self, *span: Any) -> None:  # type: ignore[override]
        self.spans.append(span)

    def wait(self, step: int, start_ns: int, end_ns: int, micro_batch: int = 0) -> None:
        self.record("wait", step, start_ns, end_ns, micro_batch)


def copy_of(cut: Cut, worker: int, plan: CommPlan) -> list[Any]:
    return [part for part in cut.parts if plan.stage_of(part.number) == plan.stage_replicas.at(worker).stage]


class Worker:
    """One worker of the pipeline, with a model of its own."""

    def __init__(self, world: "World", number: int) -> None:
        cut = world.cut()
        plan = CommPlan.of(cut, parse(world.schedule), world.stage_replicas, world.micro_batches)
        parts = copy_of(cut, number, plan)
        whole = merged_module(parts)
        self.layout = layout_of(whole, world.buffers)
        self.state, self.delta = read(whole, self.layout.new()), self.layout.new()
        self.recorder = Recording()
        options = dict(world.options)
        steps = {name: options.pop(name) for name in ("micro_steps",) if name in options}
        context = PipelineContext(
            world.program,
            plan,
            cut.captured,
            parts,
            self.layout,
            number,
            p2p=world.hub.wire(number),
            recorder=self.recorder,  # type: ignore[arg-type]
            stage_replicas=world.turns(plan.stage_replicas.at(number)),
            **options,
        )
        self.replica = Pipelined(context, **steps)
        self.optimizer = None
        if self.layout.parameters:
            self.optimizer = FlatOptimizer(world.program.optimizer, None, self.state, self.delta)
        self.clock = 0

    def gradient(self, *accumulated: Batch) -> tuple[list[float], Measured]:
        self.replica.adopt(self.state)
        losses = []
        for batch in accumulated:
            losses.append(self.replica.advance(batch, self.clock))
            self.clock += 1
        return losses, self.replica.finish(self.delta)

    def step(self, *accumulated: Batch) -> Measured:
        _, measured = self.gradient(*accumulated)
        if self.optimizer is not None:
            self.optimizer.step(self.delta.parameters)
        for mine, made in zip(self.state.buffers, self.delta.buffers, strict=True):
            mine.copy_(made)
        return measured


@dataclass
class World:
    """A pipeline: its workers work in threads."""

    program: Program
    kind: type[nn.Module]
    schedule: str
    workers: int
    micro_batches: int
    options: dict[str, Any] = field(default_factory=dict)
    rendezvous: bool = False
    buffers: tuple[str, ...] = ()
    cutter: Callable[[], Cut] | None = None
    copies: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.hub = Hub(rendezvous=self.rendezvous)
        self.stage_replicas = StageReplicas(self.copies or (1,) * self.workers)
        self.tables = [Table(count) for count in self.stage_replicas.copies]
        self.members = [Worker(self, number) for number in range(len(self.stage_replicas))]

    def turns(self, column: StageReplica) -> StageReplicaGroup | None:
        """The replicas of a column's stage."""
        table = self.tables[column.stage]
        return Turns(table, column.copy) if table.count > 1 else None

    def cut(self) -> Cut:
        if self.cutter is not None:
            return self.cutter()
        parts = parse(self.schedule).parts(self.workers)
        return by_hand(self.program.model(), BORDERS[self.kind][parts])

    def all(self, do: Callable[[Worker], Any]) -> list[Any]:
        return in_threads(self.hub, [functools.partial(do, member) for member in self.members])

    def values(self) -> Values:
        return self._merged(lambda member: member.state)

    def gradients(self) -> Values:
        return self._merged(lambda member: member.delta)

    def _merged(self, which: Callable[[Worker], FlatState]) -> Values:
        merged: Values = {}
        for member in self.members:
            for name, value in which(member).named():
                if name in merged:  # tied: identical to the bit
                    assert torch.equal(merged[name], value), name
                merged[name] = value.clone()
        return merged


def layout_of(module: nn.Module, buffers: Sequence[str]) -> FlatLayout:
    """Also of a part that has nothing to train."""
    if not any(True for _ in module.parameters()):
        return FlatLayout((), ())
    return FlatLayout.of(module, buffers)


def same(found: Values, expected: Values, bound: float = ROUNDING) -> None:
    """Parameter by parameter; what is tied may go by either name."""
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=bound, atol=bound, msg=lambda text, n=name: f"{n}: {text}"
        )
