"""What answers for a model: this process, others of this host, or those that torchrun has started."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from paceline.comm.fork_server import ForkServer
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.engine.distributed.run import own_settings
from paceline.engine.inference.worker import Answer, InferenceRequest, InferenceWorker, together
from paceline.engine.spmd.process_group import LaunchEnv, backend_for
from paceline.engine.spmd.rank_context import RankContext, open_rank_context
from paceline.engine.spmd.worker_pool import PRELOAD, Answering, WorkerPool
from paceline.program import Tree, call, leaves
from paceline.replica.capture.input_spec import batch_size
from paceline.strategy import Strategy


class Predictor(ABC):
    """Gives a model's output, as often as it is called; what it holds is let go of with the block it is entered for."""

    def __init__(self, question: InferenceRequest) -> None:
        self._question, self._closing, self._open = question, ExitStack(), False

    @final
    def __enter__(self) -> "Predictor":
        with ExitStack() as closing:
            self._begin(closing)
            self._closing, self._open = closing.pop_all(), True
        return self

    @final
    def __exit__(self, *raised: Any) -> None:
        self._open = False
        self._closing.__exit__(*raised)

    @final
    def __call__(self, inputs: Tree) -> Tree:
        """The output for a batch, whole, on the CPU, without a graph.

        Args:
            inputs: as the model is called with it: a tensor, a tuple (``model(*inputs)``) or a dict
                (``model(**inputs)``), with at least one sample.

        Raises:
            InputError: what can't be done as written.
            WorkerError: the model failed in a worker, or a worker ended; the predictor is then of no use.
        """
        refuse_inputs(inputs)
        if not self._open:
            raise InputError("a predictor answers inside its block; write with paceline.predictor(…) as ask: ask(x)")
        return self._answered(inputs)

    @abstractmethod
    def _begin(self, closing: ExitStack) -> None:
        """Make ready to answer; what has to be let go of is given to ``closing``."""

    @abstractmethod
    def _answered(self, inputs: Tree) -> Tree:
        """The output."""

    @final
    def _joined(self, found: Sequence[Answer], inputs: Tree) -> Tree:
        strategy = self._question.strategy
        return together(found, batch_size(inputs), strategy.micro_batch_count if strategy.pipelined else 1)


@final
class InProcessPredictor(Predictor):
    """This process."""

    def _begin(self, closing: ExitStack) -> None:
        del closing
        self._model = self._question.model()

    def _answered(self, inputs: Tree) -> Tree:
        with own_settings(), torch.no_grad(), self._question.program.autocast("cpu"):
            if self._question.strategy.threads is not None:
                torch.set_num_threads(self._question.strategy.threads)
            return call(self._model, inputs)


@final
class LocalPredictor(Predictor):
    """Processes of this host, made for it."""

    def _begin(self, closing: ExitStack) -> None:
        strategy = self._question.strategy
        fork_server = ForkServer.start((*PRELOAD, "paceline.engine.inference.worker"))
        closing.callback(fork_server.close)
        crew = WorkerPool(Work(self._question), strategy.workers, threads(strategy, strategy.workers), fork_server)
        self._crew = closing.enter_context(crew)

    def _answered(self, inputs: Tree) -> Tree:
        return self._joined(self._crew.ask(inputs), inputs)


@final
class TorchrunPredictor(Predictor):
    """The ranks that torchrun has started, each of which is given the same inputs and has the whole output.

    Args:
        question: what is asked.
        backend: carries what they send each other; None: what suits them.
    """

    def __init__(self, question: InferenceRequest, backend: str | None) -> None:
        super().__init__(question)
        self._backend = backend

    def _begin(self, closing: ExitStack) -> None:
        world, question = LaunchEnv.found(), self._question
        self._threads = threads(question.strategy, world.local_size)
        carrier = backend_for("cpu", self._backend, world)
        context = closing.enter_context(open_rank_context(world, carrier, "cpu", question.timeout_s, watched=True))
        self._context, self._asked = context, InferenceWorker(question, context)

    def _answered(self, inputs: Tree) -> Tree:
        with own_settings():
            torch.set_num_threads(self._threads)
            mine = self._asked(inputs)
            found = [replace(mine, pieces=pieces) for pieces in self._context.gather(mine.pieces, "the output")]
        return self._joined(found, inputs)


@dataclass(frozen=True)
class Work:
    """What a crew is told."""

    question: InferenceRequest

    @property
    def timeout_s(self) -> Seconds:
        """Bound on every wait of one for another."""
        return self.question.timeout_s

    def begin(self, context: RankContext) -> Answering:
        """One rank's."""
        return InferenceWorker(self.question, context)


def refuse_inputs(inputs: Tree) -> None:
    """Raise InputError where there is no batch."""
    if not any(leaf.dim() for leaf in leaves(inputs)):
        raise InputError(f"inputs={inputs!r} has no tensor of samples; give a batch as the model is called with it")
    if not batch_size(inputs):
        raise InputError("inputs has no sample; give at least one")


def threads(strategy: Strategy, here: int) -> int:
    """Of each worker, of so many on this host."""
    return strategy.threads or max(1, len(os.sched_getaffinity(0)) // here)
