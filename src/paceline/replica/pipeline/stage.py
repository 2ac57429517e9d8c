"""One part of a model at work: single actions, and what each micro-batch keeps between them.

::

    recompute      forward                   backward
    none           the graph is kept         | backward |
    boundaries     what came in is kept      | forward again | backward |
    all            of pieces of the part,    | backward, each piece's forward again before it |
                   what came in is kept

Single actions of one worker: what it waits for, what it computes, what it hands on.
"""

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import InputError, PacelineError, WorkerError
from paceline.replica.activation_memory import Holdings
from paceline.replica.pipeline.base import Part
from paceline.replica.pipeline.comm_plan import Message, ScheduledAction
from paceline.replica.pipeline.forward import Forward, Give, Job, Means, Pass, keeping
from paceline.replica.pipeline.micro_batches import Shapes
from paceline.replica.pipeline.p2p_queue import P2PQueue, Received
from paceline.schedule.base import Action
from paceline.trace import spans
from paceline.trace.recorder import AnyRecorder


@dataclass(frozen=True)
class Kept:
    """What came in, to make a forward pass again."""

    received: Sequence[Received]
    versions: list[int]
    nbytes: int


class Stage:
    """One part of a model, at work on one worker.

    Args:
        part: its module is in training mode.
        means: to make forward passes.
        forgets: whether micro-batches keep only what came in, and forward passes are made again.
        running: the part's buffers that training changes.
        holdings: is told what is kept.
    """

    def __init__(
        self, part: Part, means: Means, *, forgets: bool, running: Sequence[Tensor], holdings: Holdings
    ) -> None:
        self.part, self._means, self._forgets = part, means, forgets
        self._running, self._holdings = running, holdings
        self._forward = Forward(part, means)
        self._stash: dict[int, Pass | Kept] = {}
        self._differentiable: dict[Shapes, list[bool]] = {}
        self._put_off: dict[Shapes, int] = {}

    def clear(self) -> None:
        """Let go of what an attempt that was called off has left."""
        for index in list(self._stash):
            self._take(index)

    def forward(self, job: Job, received: Sequence[Received], *, turns: bool) -> tuple[list[Received], Tensor | None]:
        """What later parts need, and, in the last part, the loss.

        Args:
            job: a micro-batch.
            received: in the order of the part's crossings.
            turns: whether its backward follows at once, so that there is nothing to be gained by forgetting.
        """
        if self._forgets and not turns:
            return self._forward_blind(job, received)
        done = self._forward(job, received)
        self._put(job.index, done)
        made, done.made = done.made, []
        return made, None if done.loss is None else done.loss.detach()

    def forgot(self, job: Job) -> bool:
        """Whether the forward pass has to be made again before its backward."""
        return isinstance(self._stash[job.index], Kept)

    def recompute(self, job: Job) -> None:
        """Make a forward pass again, with the same random numbers; running buffers stay as they are."""
        kept = self._take(job.index)
        assert isinstance(kept, Kept)
        if kept.versions != _versions(job, kept.received):
            raise InputError(
                f"stage {self.part.number} writes its input in place, so its forward pass can't be made again; write "
                "inplace=False there, or recompute='none'"
            )
        with keeping(self._running):
            done = self._forward(job, kept.received, again=True)
        done.made.clear()
        self._put(job.index, done)

    def awaited(self, job: Job) -> Mapping[str, object]:
        """The names of what was sent and is to get a gradient."""
        return self._pass(job).edges

    def backward(
        self, job: Job, gradients: Mapping[str, Tensor], back: Sequence[Message], give: Give, *, split: bool
    ) -> None:
        """Gradients of what came in, and of parameters.

        Args:
            job: a micro-batch.
            gradients: of what was sent, by name.
            back: the messages by which gradients of what came in go back.
            give: sends one.
            split: leave those of weights for :meth:`backward_weight`.
        """
        done = self._pass(job)
        returns = done.portals.returning(back, give)
        roots: list[object] = [done.edges[name] for name in gradients]
        upstream = list(gradients.values())
        if done.loss is not None:
            roots.append(done.loss)
            upstream.append(torch.full_like(done.loss, job.weight))
        self._holdings.hold(done.passing_bytes)
        if roots:
            torch.autograd.backward(roots, upstream)  # type: ignore[arg-type]
        returns.close()
        self._holdings.release(done.passing_bytes)
        self._take(job.index)
        self._put(job.index, Pass([], {}, None, done.portals, done.later, self._size_put_off(job, done)))
        if not split:
            self.backward_weight(job)

    def backward_weight(self, job: Job) -> None:
        """Gradients of weights that were put off."""
        self._pass(job).later.run()
        self._take(job.index)

    def end(self) -> None:
        """A mini-batch has ended."""
        assert not self._stash, "each forward has had its backward"
        if self._means.deferred is not None:
            self._means.deferred.commit()

    def _forward_blind(self, job: Job, received: Sequence[Received]) -> tuple[list[Received], Tensor | None]:
        shapes, versions = job.micro_batch.shapes, _versions(job, received)
        if shapes in self._differentiable:
            values, loss = self._forward.blind(job, received)
            made = list(map(Received, values, self._differentiable[shapes]))
        else:  # only a pass with a graph tells what of it is differentiable
            done = self._forward(job, received)
            made, loss = done.made, None if done.loss is None else done.loss.detach()
            self._differentiable[shapes] = [differentiable for _, differentiable in made]
        self._put(job.index, Kept(received, versions, self._size_received(job, received)))
        return made, loss

    def _size_received(self, job: Job, received: Sequence[Received]) -> int:
        tally = self._forward.tally(job.micro_batch)
        tally.add_all(value for value, _ in received)
        return tally.nbytes

    def _size_put_off(self, job: Job, done: Pass) -> int:
        shapes = job.micro_batch.shapes
        if shapes not in self._put_off:
            tally = self._forward.tally(job.micro_batch)
            done.later.tally(tally)
            self._put_off[shapes] = tally.nbytes
        return self._put_off[shapes]

    def _pass(self, job: Job) -> Pass:
        done = self._stash[job.index]
        assert isinstance(done, Pass)
        return done

    def _put(self, index: int, what: Pass | Kept) -> None:
        self._stash[index] = what
        self._holdings.hold(what.nbytes)

    def _take(self, index: int) -> Pass | Kept:
        what = self._stash.pop(index)
        self._holdings.release(what.nbytes)
        return what


def _versions(job: Job, received: Sequence[Received]) -> list[int]:
    """They grow whenever a tensor is written in place."""
    values = [*job.micro_batch.inputs, *(value for value, _ in received)]
    return [value._version for value in values if isinstance(value, Tensor)]


class ActionExecutor:
    """One worker's.

    Args:
        stages: its parts, by number.
        mail: to and from other parts.
        recorder: of its spans.
    """

    def __init__(self, stages: Mapping[int, Stage], mail: P2PQueue, recorder: AnyRecorder) -> None:
        self._stages, self._mail, self._recorder = stages, mail, recorder

    def do(self, task: ScheduledAction, following: ScheduledAction | None, job: Job, step: int) -> Tensor | None:
        """One action; returns the micro-batch's loss where it is the last part's forward.

        Args:
            task: what to do, with an action that is no update.
            following: what comes after it, whose messages are expected already.
            job: the micro-batch.
            step: of the spans.

        Raises:
            WorkerError: something in it failed; says where.
        """
        if following is not None and following.needs:
            self._mail.look_ahead(max(message.rank for message in following.needs))
        try:
            return self._do(task, following, job, step)
        except PacelineError:
            raise
        except Exception as error:
            raise _failed(task.action, error) from error

    def _do(self, task: ScheduledAction, following: ScheduledAction | None, job: Job, step: int) -> Tensor | None:
        if task.action.kind == "forward":
            return self._forward(task, following, job, step)
        if task.action.kind == "backward_weight":
            with self._timed("backward_weight", job, step):
                self._stages[task.action.stage].backward_weight(job)
        else:
            self._backward(task, job, step)
        return None

    def _forward(self, task: ScheduledAction, following: ScheduledAction | None, job: Job, step: int) -> Tensor | None:
        stage = self._stages[task.action.stage]
        received = self._values(task, job, step)
        with self._timed("forward", job, step):
            made, loss = stage.forward(job, received, turns=following is not None and _turns(task, following))
        self._send(stage, task, made, job, step)
        return loss

    def _backward(self, task: ScheduledAction, job: Job, step: int) -> None:
        stage = self._stages[task.action.stage]
        if stage.forgot(job):
            with self._timed("recompute", job, step):
                stage.recompute(job)
        gradients = self._gradients(task, stage.awaited(job), job, step)
        split = task.action.kind == "backward_input"
        with self._timed("backward_input" if split else "backward", job, step) as moved:

            def give(message: Message, gradient: Tensor) -> None:
                moved[0] += self._mail.send_back(message, gradient)

            stage.backward(job, gradients, task.gives, give, split=split)

    def _values(self, task: ScheduledAction, job: Job, step: int) -> list[Received]:
        """What a forward pass is made of, in the order in which the part takes it."""
        if not task.needs:
            return []
        with self._timed("wait", job, step):
            there = {message.name: self._mail.take(message) for message in task.needs}
        return [there[crossing.name] for crossing in self._stages[task.action.stage].part.received]

    def _gradients(
        self, task: ScheduledAction, awaited: Mapping[str, object], job: Job, step: int
    ) -> dict[str, Tensor]:
        """Of each value that was sent, summed over its consumers in ascending order."""
        sums: dict[str, Tensor] = {}
        needs = [message for message in task.needs if message.name in awaited]
        if not needs:
            return sums
        with self._timed("wait", job, step):
            for message in needs:
                gradient, _ = self._mail.take(message)
                assert isinstance(gradient, Tensor)
                sums[message.name] = sums[message.name] + gradient if message.name in sums else gradient
        return sums

    def _send(self, stage: Stage, task: ScheduledAction, made: list[Received], job: Job, step: int) -> None:
        if not task.gives:
            return
        by_name = {crossing.name: each for crossing, each in zip(stage.part.sent, made, strict=True)}
        with self._timed("send", job, step) as moved:
            for message in task.gives:
                value, differentiable = by_name[message.name]
                moved[0] += self._mail.send(message, value, differentiable=differentiable)

    @contextmanager
    def _timed(self, action: spans.Action, job: Job, step: int) -> Iterator[list[int]]:
        """Record what is done while it is entered; the caller counts the bytes that it moves."""
        moved, began = [0], time.monotonic_ns()
        yield moved
        self._recorder.record(action, step, began, time.monotonic_ns(), job.index, moved[0])


def _turns(task: ScheduledAction, following: ScheduledAction) -> bool:
    """Whether the next action is the backward of this forward."""
    here, there = task.action, following.action
    return (here.stage, here.micro_batch) == (there.stage, there.micro_batch)


def _failed(action: Action, error: Exception) -> WorkerError:
    told = "".join(traceback.format_exception(error))
    return WorkerError(
        f"stage {action.stage}, micro-batch {action.micro_batch}, {action}: {type(error).__name__}: {error}\n\n{told}"
    )
