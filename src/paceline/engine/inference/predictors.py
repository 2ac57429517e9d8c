"""Predictors of a model: in this process, in other processes of this host, or in ranks that torchrun has started."""

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
from paceline.engine.inference.worker import Answer, InferenceRequest, InferenceWorker, join_answers
from paceline.engine.run_context import own_settings
from paceline.engine.spmd.launcher import PRELOAD, Answering, WorkerPool
from paceline.engine.spmd.process_group import LaunchEnv, backend_for
from paceline.engine.spmd.rank_context import RankContext, open_rank_context
from paceline.program import Tree, call, leaves
from paceline.replica.capture.input_spec import batch_size
from paceline.strategy import Strategy


class Predictor(ABC):
    """Computes a model's output at each call; context manager: its resources are released at the end of the block."""

    def __init__(self, request: InferenceRequest) -> None:
        self._request, self._closing, self._open = request, ExitStack(), False

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
        """Return the whole output for a batch, on the CPU, without a graph.

        Args:
            inputs: as the model is called with them: a tensor, a tuple (``model(*inputs)``) or a dict
                (``model(**inputs)``), with at least one sample.

        Returns:
            The output, as the model returns it.

        Raises:
            InputError: what can't be done as written.
            WorkerError: the model failed in a worker, or a worker ended; the predictor can't be used any more.
        """
        refuse_inputs(inputs)
        if not self._open:
            raise InputError("a predictor answers inside its block; write with paceline.predictor(…) as ask: ask(x)")
        return self._output(inputs)

    @abstractmethod
    def _begin(self, closing: ExitStack) -> None:
        """Prepare to answer; ``closing`` releases what has to be released."""

    @abstractmethod
    def _output(self, inputs: Tree) -> Tree:
        """Return the whole output."""

    @final
    def _join(self, answers: Sequence[Answer], inputs: Tree) -> Tree:
        strategy = self._request.strategy
        return join_answers(answers, batch_size(inputs), strategy.micro_batch_count if strategy.pipelined else 1)


@final
class InProcessPredictor(Predictor):
    """Predictor in this process."""

    def _begin(self, closing: ExitStack) -> None:
        del closing
        self._model = self._request.model()

    def _output(self, inputs: Tree) -> Tree:
        with own_settings(), torch.no_grad(), self._request.program.autocast("cpu"):
            if self._request.strategy.threads is not None:
                torch.set_num_threads(self._request.strategy.threads)
            return call(self._model, inputs)


@final
class LocalPredictor(Predictor):
    """Predictor in processes of this host that it starts."""

    def _begin(self, closing: ExitStack) -> None:
        strategy = self._request.strategy
        fork_server = ForkServer.start((*PRELOAD, "paceline.engine.inference.worker"))
        closing.callback(fork_server.close)
        pool = WorkerPool(
            InferenceTask(self._request), strategy.workers, threads(strategy, strategy.workers), fork_server
        )
        self._pool = closing.enter_context(pool)

    def _output(self, inputs: Tree) -> Tree:
        return self._join(self._pool.ask(inputs), inputs)


@final
class TorchrunPredictor(Predictor):
    """Predictor in the ranks that torchrun has started: each is called with the same inputs and has the whole output.

    Args:
        request: model and strategy.
        backend: of the process group; None: the usual one for the device.
    """

    def __init__(self, request: InferenceRequest, backend: str | None) -> None:
        super().__init__(request)
        self._backend = backend

    def _begin(self, closing: ExitStack) -> None:
        world, request = LaunchEnv.current(), self._request
        self._threads = threads(request.strategy, world.local_size)
        backend = backend_for("cpu", self._backend, world)
        context = closing.enter_context(open_rank_context(world, backend, "cpu", request.timeout_s, watched=True))
        self._context, self._worker = context, InferenceWorker(request, context)

    def _output(self, inputs: Tree) -> Tree:
        with own_settings():
            torch.set_num_threads(self._threads)
            local = self._worker(inputs)
            answers = [replace(local, pieces=pieces) for pieces in self._context.gather(local.pieces, "the output")]
        return self._join(answers, inputs)


@dataclass(frozen=True)
class InferenceTask:
    """Task of a worker pool: answer for a model."""

    request: InferenceRequest

    @property
    def timeout_s(self) -> Seconds:
        """Return the bound on every wait of one rank for another."""
        return self.request.timeout_s

    def begin(self, context: RankContext) -> Answering:
        """Return the worker of one rank."""
        return InferenceWorker(self.request, context)


def refuse_inputs(inputs: Tree) -> None:
    """Raise InputError if there is no batch."""
    if not any(leaf.dim() for leaf in leaves(inputs)):
        raise InputError(f"inputs={inputs!r} has no tensor of samples; give a batch as the model is called with it")
    if not batch_size(inputs):
        raise InputError("inputs has no sample; give at least one")


def threads(strategy: Strategy, workers_here: int) -> int:
    """Return the CPU threads of each worker, of so many on this host."""
    return strategy.threads or max(1, len(os.sched_getaffinity(0)) // workers_here)
