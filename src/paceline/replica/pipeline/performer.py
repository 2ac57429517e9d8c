"""Single actions of one worker: what it waits for, what it computes, what it hands on."""

import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from paceline.core.errors import PacelineError, WorkerError
from paceline.replica.pipeline.forward import Job
from paceline.replica.pipeline.mail import Mail, Received
from paceline.replica.pipeline.messages import Message, Task
from paceline.replica.pipeline.stage import Stage
from paceline.schedule.base import Action
from paceline.trace import spans
from paceline.trace.recorder import AnyRecorder


class Performer:
    """One worker's.

    Args:
        stages: its parts, by number.
        mail: to and from other parts.
        recorder: of its spans.
    """

    def __init__(self, stages: Mapping[int, Stage], mail: Mail, recorder: AnyRecorder) -> None:
        self._stages, self._mail, self._recorder = stages, mail, recorder

    def do(self, task: Task, following: Task | None, job: Job, step: int) -> Tensor | None:
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

    def _do(self, task: Task, following: Task | None, job: Job, step: int) -> Tensor | None:
        if task.action.kind == "forward":
            return self._forward(task, following, job, step)
        if task.action.kind == "backward_weight":
            with self._timed("backward_weight", job, step):
                self._stages[task.action.stage].backward_weight(job)
        else:
            self._backward(task, job, step)
        return None

    def _forward(self, task: Task, following: Task | None, job: Job, step: int) -> Tensor | None:
        stage = self._stages[task.action.stage]
        received = self._values(task, job, step)
        with self._timed("forward", job, step):
            made, loss = stage.forward(job, received, turns=following is not None and _turns(task, following))
        self._send(stage, task, made, job, step)
        return loss

    def _backward(self, task: Task, job: Job, step: int) -> None:
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

    def _values(self, task: Task, job: Job, step: int) -> list[Received]:
        """What a forward pass is made of, in the order in which the part takes it."""
        if not task.needs:
            return []
        with self._timed("wait", job, step):
            there = {message.name: self._mail.take(message) for message in task.needs}
        return [there[crossing.name] for crossing in self._stages[task.action.stage].part.received]

    def _gradients(self, task: Task, awaited: Mapping[str, object], job: Job, step: int) -> dict[str, Tensor]:
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

    def _send(self, stage: Stage, task: Task, made: list[Received], job: Job, step: int) -> None:
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


def _turns(task: Task, following: Task) -> bool:
    """Whether the next action is the backward of this forward."""
    here, there = task.action, following.action
    return (here.stage, here.micro_batch) == (there.stage, there.micro_batch)


def _failed(action: Action, error: Exception) -> WorkerError:
    told = "".join(traceback.format_exception(error))
    return WorkerError(
        f"stage {action.stage}, micro-batch {action.micro_batch}, {action}: {type(error).__name__}: {error}\n\n{told}"
    )
