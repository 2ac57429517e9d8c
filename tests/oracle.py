"""Plain PyTorch loops that every engine is tested against. Slow, obvious, and of the library only words and values:
the program's fields, the order of the data, the seed of a step and the draws of virtual time.
"""

import functools
import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline import Program
from paceline.clock.times import Times
from paceline.core.data_order import DataOrder
from paceline.replica.autograd import step_seed

Values = dict[str, Tensor]
"""Parameters and buffers by full name."""

Take = Callable[["Plain", int, int], Values]
"""(a model at the A that was read, replica, clock) -> its gradient."""


class Plain:
    """A model with an optimizer of its own, as a script would have it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(program.seed)
            self.module: nn.Module = program.model().train()
        self.trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.optimizer = program.optimizer(list(self.trained.values()))
        self.scheduler = program.scheduler(self.optimizer) if program.scheduler else None

    def values(self) -> Values:
        """A copy of all parameters and buffers."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in named}

    def load(self, values: Values) -> "Plain":
        with torch.no_grad():
            for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
                tensor.copy_(values[name])
        return self

    def gradient(self, indices: Any, seed: int = 0) -> Values:
        """Of the mean loss over these samples, at the parameters as they are."""
        self.module.zero_grad(set_to_none=True)
        inputs, targets = (pick(part, torch.as_tensor(indices)) for part in self.program.train)
        with torch.random.fork_rng(devices=[]), self.program.autocast("cpu"):
            torch.manual_seed(seed)
            loss = self.program.loss(feed(self.module, inputs), targets)
        loss.backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in self.trained.items()}

    def step(self, gradient: Values, rate: float = 1.0) -> None:
        """One update by a given gradient: clipped, with the learning rate times ``rate``."""
        for name, parameter in self.trained.items():
            parameter.grad = gradient[name].clone()
        if self.program.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.trained.values(), self.program.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] *= rate
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] /= rate
        if self.scheduler is not None:
            self.scheduler.step()


def pick(tree: Any, indices: Tensor) -> Any:
    if isinstance(tree, dict):
        return {k: v[indices] for k, v in tree.items()}
    return tuple(v[indices] for v in tree) if isinstance(tree, tuple) else tree[indices]


def feed(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def order(program: Program, replicas: int, accumulate: int = 1) -> DataOrder:
    samples = len(program.train[1])
    return DataOrder(samples, program.per_replica_batch(replicas, accumulate), replicas, program.seed)


def one_process(program: Program, replicas: int, steps: int, accumulate: int = 1) -> Values:
    """One process that sees, step by step, all that the replicas together see."""
    plain, data = Plain(program), order(program, replicas, accumulate)
    for step in range(steps):
        micro = range(step * accumulate, (step + 1) * accumulate)
        seen = [i for k in micro for replica in range(replicas) for i in data.batch(replica, k).tolist()]
        plain.step(plain.gradient(seen))
    return plain.values()


def rounds(
    program: Program, replicas: int, steps: int, sent: Callable[[int, Values], Values] = lambda _, gradient: gradient
) -> Values:
    """Replica by replica: the mean of their gradients (and buffers), each under its own seed, weighed by samples.

    ``sent`` says what becomes of a replica's gradient on its way.
    """
    plain, data = Plain(program), order(program, replicas)
    for k in range(steps):
        before, total, buffers = plain.values(), {n: torch.zeros_like(p) for n, p in plain.trained.items()}, {}
        batches = [data.batch(r, k) for r in range(replicas)]
        samples = sum(map(len, batches))
        for replica, batch in enumerate(batches):
            if len(batch):
                gradient = plain.load(before).gradient(batch, step_seed(program.seed, replica, k))
                gradient = sent(replica, gradient)
                mean_into(total, gradient, len(batch) / samples)
                mean_into(buffers, dict(plain.module.named_buffers()), len(batch) / samples)
        plain.load(before | buffers).step(total)
    return plain.values()


def mean_into(total: Values, values: Values, weight: float) -> None:
    """Add a part of a mean; counters take the largest."""
    for name, value in values.items():
        before = total.get(name, torch.zeros_like(value))
        total[name] = before + weight * value if value.is_floating_point() else torch.maximum(before, value)


# --------------------------------------------------------------------------------------------- replicas out of step


@dataclass(order=True)
class Event:
    """The Δ of a replica's ``clock``-th attempt (from 0) arrives."""

    time_s: float
    replica: int
    clock: int = field(compare=False)


def arrivals(times: Times, seed: int, replicas: int, attempts: int, micro_steps: int = 1) -> Iterator[Event]:
    """Free-running replicas in the order in which their Δs arrive, each released at once."""
    streams = [times.stream("compute", seed, r) for r in range(replicas)]

    def draw(replica: int) -> float:
        return sum(next(streams[replica]) for _ in range(micro_steps))

    queue = [Event(draw(r), r, 0) for r in range(replicas)]
    heapq.heapify(queue)
    while queue:
        event = heapq.heappop(queue)
        yield event
        if event.clock + 1 < attempts:
            heapq.heappush(queue, Event(event.time_s + draw(event.replica), event.replica, event.clock + 1))


def parameter_server(
    program: Program, times: Times, replicas: int, steps: int, rate: Callable[[int], float] = lambda staleness: 1.0
) -> tuple[Values, list[int]]:
    """Asynchronous SGD as a script: a Δ is the gradient at the A that its replica read, applied to the A there is.

    A takes the running buffers of each Δ as they are, but counters never go back. Returns the trained values and the
    staleness of each update.
    """
    server, worker, data = Plain(program), Plain(program), order(program, replicas)
    versions = [server.values()]
    read, staleness = [0] * replicas, []
    for event in arrivals(times, program.seed, replicas, steps):
        batch = data.batch(event.replica, event.clock)
        if len(batch):
            worker.load(versions[read[event.replica]])
            gradient = worker.gradient(batch, step_seed(program.seed, event.replica, event.clock))
            staleness.append(len(versions) - 1 - read[event.replica])
            buffers = dict(server.module.named_buffers())
            for name, value in worker.module.named_buffers():
                buffers[name].copy_(value if value.is_floating_point() else torch.maximum(buffers[name], value))
            server.step(gradient, rate(staleness[-1]))
            versions.append(server.values())
        read[event.replica] = len(versions) - 1
    return server.values(), staleness


def one_exchange_behind(program: Program, steps: int) -> Values:
    """One replica that pulls ahead: each gradient is of the A before the one that there is."""
    server, worker, data = Plain(program), Plain(program), order(program, 1)
    versions = [server.values()]
    for k in range(steps):
        worker.load(versions[max(0, k - 1)])
        server.step(worker.gradient(data.batch(0, k), step_seed(program.seed, 0, k)))
        versions.append(server.values())
    return server.values()


def local_steps(
    program: Program, replicas: int, rounds: int, period: int, outer: Callable[[Values, Values], Values] | None = None
) -> Values:
    """Each replica walks ``period`` steps with its own optimizer; A moves by the mean change, or as ``outer`` says."""
    workers, data = [Plain(program) for _ in range(replicas)], order(program, replicas)
    state = workers[0].values()
    for round_ in range(rounds):
        changes, samples = [], []
        for replica, worker in enumerate(workers):
            batches = [data.batch(replica, round_ * period + i) for i in range(period)]
            walk(worker.load(state), batches)
            changes.append({n: p.detach() - state[n] for n, p in worker.trained.items()})
            samples.append(sum(map(len, batches)))
        mean = {n: sum(c[n] * s / sum(samples) for c, s in zip(changes, samples, strict=True)) for n in changes[0]}
        state = state | (outer(state, mean) if outer else {n: state[n] + d for n, d in mean.items()})
    return state


def nesterov(lr: float, momentum: float) -> Callable[[Values, Values], Values]:
    """SGD with Nesterov's momentum on minus the mean change, written out."""
    velocity: Values = {}

    def move(state: Values, change: Values) -> Values:
        for name, delta in change.items():
            velocity[name] = momentum * velocity.get(name, torch.zeros_like(delta)) - delta
        return {n: state[n] - lr * (momentum * velocity[n] - change[n]) for n in change}

    return move


def downpour(program: Program, times: Times, replicas: int, pushes: int, period: int) -> Values:
    """Each replica walks from the A that it read and adds its change to the A there is."""
    workers, data = [Plain(program) for _ in range(replicas)], order(program, replicas)
    state = workers[0].values()
    read = [state] * replicas
    for event in arrivals(times, program.seed, replicas, pushes, period):
        worker = workers[event.replica].load(read[event.replica])
        walk(worker, [data.batch(event.replica, event.clock * period + i) for i in range(period)])
        change = {n: p.detach() - read[event.replica][n] for n, p in worker.trained.items()}
        state = state | {n: state[n] + d for n, d in change.items()}
        read[event.replica] = state
    return state


class Rounds:
    """DiLoCo whose rounds wait for a quorum, and a while; :meth:`run` returns A, and when each round was merged.

    Each replica walks on from its own x while its change is on the way to A; x takes over what A has of the others'.
    """

    def __init__(self, program: Program, times: Times, replicas: int, period: int, quorum: int, grace: float) -> None:
        self.workers, self.data = [Plain(program) for _ in range(replicas)], order(program, replicas)
        self.streams = [times.stream("compute", program.seed, r) for r in range(replicas)]
        self.period, self.quorum, self.grace, self.outer = period, quorum, grace, nesterov(0.7, 0.9)
        self.state = self.workers[0].values()
        self.starts = [self.state] * replicas
        self.began: list[float | None] = [None] * replicas
        self.mean: list[float] = [math.inf] * replicas
        self.made, self.now, self.merged = [0] * replicas, 0.0, list[float]()
        self.queue, self.present = list[Event](), set(range(replicas))
        self.open: dict[int, tuple[Values, int]] = {}
        self.late: dict[int, tuple[Values, int]] = {}
        self.closes = math.inf

    def run(self, pushes: int) -> tuple[Values, list[float]]:
        for replica in range(len(self.workers)):
            self.begin(replica)
        while self.queue:
            enough = len(self.open.keys() & self.present) >= min(self.quorum, len(self.present))
            deadline = self.now if self.closes == math.inf else self.closes
            if self.open and enough and deadline < self.queue[0].time_s:
                self.now = max(self.now, deadline)
                self.merge(pushes)
            else:
                self.arrive(heapq.heappop(self.queue), pushes)
            while self.open and self.present <= self.open.keys():
                self.merge(pushes)
        return self.state, self.merged

    def begin(self, replica: int) -> None:
        walked = sum(next(self.streams[replica]) for _ in range(self.period))
        heapq.heappush(self.queue, Event(self.now + walked, replica, self.made[replica]))

    def arrive(self, event: Event, pushes: int) -> None:
        replica, worker, self.now = event.replica, self.workers[event.replica], event.time_s
        began, mean = self.began[replica], self.mean[replica]
        if began is not None:
            self.mean[replica] = self.now - began if mean == math.inf else (self.now - began + mean) / 2
        batches = [self.data.batch(replica, event.clock * self.period + i) for i in range(self.period)]
        walk(worker.load(self.starts[replica]), batches)
        change = {n: p.detach() - self.starts[replica][n] for n, p in worker.trained.items()}
        self.made[replica] += 1
        if replica in self.open:
            self.late[replica] = change, sum(map(len, batches))
        else:
            self.open[replica] = change, sum(map(len, batches))
            self.go_on(replica, change, pushes)

    def go_on(self, replica: int, change: Values, pushes: int) -> None:
        self.starts[replica] = {n: value + change[n] for n, value in self.state.items()}
        self.began[replica] = self.now
        self.closes = min(self.closes, self.now + self.grace * self.mean[replica])
        if self.made[replica] == pushes:
            self.present.remove(replica)
        else:
            self.begin(replica)

    def merge(self, pushes: int) -> None:
        samples = sum(n for _, n in self.open.values())
        mean = {n: sum(self.open[r][0][n] * (self.open[r][1] / samples) for r in sorted(self.open)) for n in self.state}
        self.state = self.state | self.outer(self.state, mean)
        self.merged.append(self.now)
        self.open, self.late, self.closes = self.late, {}, math.inf
        for replica in sorted(self.open):
            self.go_on(replica, self.open[replica][0], pushes)


def elastic(program: Program, times: Times, replicas: int, pushes: int, period: int, alpha: float) -> Values:
    """Zhang et al. 2015, Algorithm 1: x -= α(x - A) and A += α(x - A), both with x and A as they were."""
    workers, data = [Plain(program) for _ in range(replicas)], order(program, replicas)
    centre = workers[0].values()
    for event in arrivals(times, program.seed, replicas, pushes, period):
        worker = workers[event.replica]
        walk(worker, [data.batch(event.replica, event.clock * period + i) for i in range(period)])
        pull = {n: alpha * (p.detach() - centre[n]) for n, p in worker.trained.items()}
        worker.load({n: v - pull[n] if n in pull else v for n, v in worker.values().items()})
        centre = {n: v + pull[n] if n in pull else v for n, v in centre.items()}
    return centre


def elastic_rounds(program: Program, replicas: int, rounds: int, period: int, alpha: float) -> Values:
    """The synchronous form: in each round all replicas and A meet as they are."""
    workers, data = [Plain(program) for _ in range(replicas)], order(program, replicas)
    centre = workers[0].values()
    for k in range(rounds):
        moved = {name: torch.zeros_like(value) for name, value in centre.items()}
        for replica, worker in enumerate(workers):
            walk(worker, [data.batch(replica, k * period + i) for i in range(period)])
            pull = {n: alpha * (p.detach() - centre[n]) for n, p in worker.trained.items()}
            worker.load({n: v - pull[n] if n in pull else v for n, v in worker.values().items()})
            moved |= {n: moved[n] + pull[n] for n in pull}
        centre = {n: v + moved[n] for n, v in centre.items()}
    return centre


def walk(worker: Plain, batches: list[Any]) -> None:
    for batch in batches:
        if len(batch):
            worker.step(worker.gradient(batch))


# ------------------------------------------------------------------------------------------------------- comparison


def assert_same(module: nn.Module, expected: Values, bound: float) -> None:
    """Every parameter and buffer, by name, differs by at most ``bound``, absolute and relative; 0: to the bit."""
    found = dict(module.named_parameters()) | dict(module.named_buffers())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].detach(), value, rtol=bound, atol=bound, msg=functools.partial(_named, name)
        )


def _named(name: str, message: str) -> str:
    return f"{name}: {message}"
