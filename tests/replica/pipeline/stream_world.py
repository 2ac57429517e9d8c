"""A pipeline in threads whose weights move within a stream, and the slow reference that keeps every version of A."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline import Program
from paceline.core.mesh import StageReplicas
from paceline.replica.base import Batch, Measured
from paceline.replica.flat_state import FlatLayout, read
from paceline.replica.pipeline.async_stage import AsyncStage
from paceline.replica.pipeline.comm_plan import CommPlan, PipelineContext
from paceline.replica.pipeline.micro_batches import micro_batch_sizes
from paceline.replica.pipeline.stage_runtime import merged_module
from paceline.schedule import parse
from tests.replica.pipeline.hand_cuts import BORDERS as RUNTIME_BORDERS
from tests.replica.pipeline.hand_cuts import by_hand
from tests.replica.pipeline.pipeline_world import Recording, Values, copy_of, layout_of, rows
from tests.replica.pipeline.thread_p2p import Hub, in_threads


class Passing(nn.Module):
    """Values that pass over parts, one of them used twice; a mask; a number; each parameter in one part."""

    def __init__(self) -> None:
        super().__init__()
        self.l0, self.l1, self.l2, self.l3 = (nn.Linear(6, 6) for _ in range(4))
        self.gain = nn.Parameter(torch.full((6,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.l0(x))
        mask = a > 0.1
        width = a.size(1)
        b = torch.relu_(self.l1(a)) + a
        c = torch.sin(self.l2(b)).t()
        d = torch.where(mask, c.t(), a * b)
        return self.l3(d) * self.gain / width + a


BORDERS = RUNTIME_BORDERS | {
    Passing: {1: (), 2: ("l2",), 3: ("l1", "where"), 4: ("l1", "l2", "where")},
}

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Member:
    """One worker, with a model of its own."""

    def __init__(self, stream: "Stream", number: int) -> None:
        module = stream.program.model()
        cut = by_hand(module, BORDERS[stream.kind][stream.workers])
        schedule = parse(stream.schedule).resolved(stream.micro_batches)
        plan = CommPlan.of(cut, schedule, StageReplicas((1,) * stream.workers), stream.micro_batches)
        parts = copy_of(cut, number, plan)
        mine = merged_module(parts)
        buffers = [name for name, _ in module.named_buffers() if name.rpartition(".")[2] in BUFFERS]
        layout = layout_of(mine, buffers)
        self.start, self.out = read(mine, layout.new()), layout.new()
        self.names = {name for name, _ in self.start.named()}
        self.recorder = Recording()
        context = PipelineContext(
            stream.program,
            plan,
            cut.captured,
            parts,
            layout,
            number,
            p2p=stream.hub.wire(number),
            recorder=self.recorder,  # type: ignore[arg-type]
            **stream.options,
        )
        self.replica = AsyncStage(context, FlatLayout.of(module))
        self.replica.adopt(self.start)
        self.clock = 0
        self.seen: list[tuple[int, Values]] = []
        """After each step: how many updates have been made, and what the weights are then."""

    def step(self, batch: Batch) -> tuple[float, Measured]:
        loss = self.replica.advance(batch, self.clock)
        self.clock += 1
        self._look()
        return loss, self.replica.finish(self.out)

    def drain(self) -> bool:
        finite = self.replica.drain()
        self._look()
        return finite

    def buffers(self) -> Values:
        self.replica.finish(self.out)
        names = (entry.name for block in self.out.layout.buffers for entry in block.entries)
        return {name: view.clone() for name, view in zip(names, self.out.views.buffers, strict=True)}

    def _look(self) -> None:
        weights = self.replica.stash.state
        found = zip(weights.layout.parameter_names, weights.views.parameters, strict=True)
        self.seen.append((self.replica.stash.newest, {name: view.clone() for name, view in found}))


@dataclass
class Stream:
    """All workers, in threads."""

    program: Program
    kind: type[nn.Module]
    schedule: str
    workers: int
    micro_batches: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hub = Hub()
        self.members = [Member(self, number) for number in range(self.workers)]

    def all(self, do: Callable[[Member], Any]) -> list[Any]:
        return in_threads(self.hub, [functools.partial(do, member) for member in self.members])

    def run(self, batches: Sequence[Batch]) -> list[list[tuple[float, Measured]]]:
        """Each worker goes through all batches as quickly as it can, and to the end of the stream."""

        def life(member: Member) -> list[tuple[float, Measured]]:
            found = [member.step(batch) for batch in batches]
            assert member.drain()
            return found

        return self.all(life)

    def holder(self) -> dict[str, int]:
        """Parameter -> worker."""
        return {name: number for number, member in enumerate(self.members) for name in member.names}


class Versioned:
    """One process with all versions of A: w(t+1) = w(t) - step(∇f(w_0(t - s_0), ..., w_{p-1}(t - s_{p-1})))."""

    def __init__(self, program: Program, holder: Mapping[str, int], stale: Callable[[int], int]) -> None:
        self.program, self.holder, self.stale = program, holder, stale
        self.module = program.model()
        self.parameters = dict(self.module.named_parameters())
        self.optimizer = program.optimizer(list(self.parameters.values()))
        self.scheduler = program.scheduler(self.optimizer) if program.scheduler else None
        self.history = [self.copy()]

    def copy(self) -> Values:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def step(self, batch: Batch, micro_batches: int) -> float:
        t = len(self.history) - 1
        weights = {
            name: self.history[max(0, t - self.stale(worker))][name].clone().requires_grad_()
            for name, worker in self.holder.items()
            if name in self.parameters
        }
        total, start = 0.0, 0
        for count in micro_batch_sizes(batch.samples, micro_batches):
            stop = start + count
            inputs, target = rows(batch.input, start, stop), rows(batch.target, start, stop)
            given = inputs if isinstance(inputs, tuple) else (inputs,)
            output = functional_call(self.module, weights, given)
            loss: Tensor = self.program.loss(output, target) * (count / batch.samples)
            loss.backward()  # type: ignore[no-untyped-call]
            total, start = total + float(loss.detach()), stop
        for name, parameter in self.parameters.items():
            gradient = weights[name].grad
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.history.append(self.copy())
        return total
