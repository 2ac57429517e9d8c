"""Evaluation of snapshots of A: losses and metrics on the test set and on a fixed sample of the training set.

Snapshots queue up and are evaluated off the training path. How a snapshot gets to its evaluator differs by engine::

    local        a process, one snapshot at a time through shared memory  --+
    ray          an actor, through the object store                         +--> the rest, where the evaluator has
    distributed  rank k mod P, after training                               |    died: by the process of the queue
    virtual      in place ---------------------------------------------------
"""

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.comm.linux import available_bytes
from paceline.core.errors import WorkerError
from paceline.core.records import Record
from paceline.device import CPU, placed
from paceline.program import Data, Program, Tree, apart, call, is_source, length, on_device
from paceline.replica.batches import Fetch, fetcher
from paceline.replica.flat_state import FlatState, write

# How many training samples the training loss is taken on, the same ones for every strategy and run.
TRAIN_SAMPLE = 2048

# Samples in one forward pass.
CHUNK = 1024

# Share of the free memory that queued snapshots may fill; beyond that the run waits for the evaluator.
QUEUE_SHARE = 0.25

_TAG = int.from_bytes(b"training sample")

# name -> (output, target) -> mean.
Metrics: TypeAlias = Mapping[str, Callable[[Tree, Tree], Any]]

# Samples of one forward pass: (fetch, their indices).
Chunk: TypeAlias = tuple[Fetch, NDArray[np.int64]]


# Record of a snapshot that is still to be evaluated: its only loss, train_loss, is the mean of the newest Δs'.
SnapshotInfo: TypeAlias = Record


class Evaluator:
    """Evaluates states of one program.

    Args:
        program: gives the data, loss and metrics (resolved: not None).
        module: an instance of the model whose values the evaluator may overwrite.
        device: on which it computes.
    """

    def __init__(self, program: Program, module: nn.Module, device: torch.device = CPU) -> None:
        placed(module, device=device)
        self._program, self._module, self._device = program, module.eval(), device
        self._loss = apart(program.loss)  # in virtual time the program's is that of training
        self._metrics = dict(program.metrics or {})
        self._test = self._train = list[Chunk]()
        if program.test is not None:
            test = cast(Data, program.test)
            self._test = _chunks(program, test, np.arange(length(test)))
        if not is_source(program.train):
            train = cast(Data, program.train)
            sample = np.random.default_rng(_TAG).permutation(length(train))[:TRAIN_SAMPLE]
            self._train = _chunks(program, train, np.sort(sample))

    def test(self) -> dict[str, float]:
        """Return the loss and the metrics of the module as it is on the test set, called as in a record."""
        return {f"test_{name}": value for name, value in self._mean("test set", self._test, self._metrics).items()}

    def score(self, state: FlatState, info: SnapshotInfo) -> Record:
        """Return the record of one snapshot; without a training set to sample it keeps its training loss."""
        write(self._module, state)
        train_loss = self._mean("training sample", self._train, {}).get("loss", info.train_loss)
        test = self._mean("test set", self._test, self._metrics)
        loss, accuracy = test.pop("loss", None), test.pop("accuracy", None)
        return replace(info, train_loss=train_loss, test_loss=loss, test_accuracy=accuracy, test_metrics=test)

    @torch.no_grad()
    def _mean(self, data: str, chunks: list[Chunk], metrics: Metrics) -> dict[str, float]:
        """Compute means over all samples of the chunks, by name; a mean that is not finite stays as it is."""
        sums: dict[str, float] = {}
        for fetch, indices in chunks:
            try:
                inputs, targets = (on_device(x, self._device) for x in fetch(indices))
                with self._program.autocast(str(self._device)):
                    output = call(self._module, inputs)
                    loss = self._loss(output, targets)
                targets = self._program.labels(inputs, targets)
                values = {"loss": float(loss)} | {n: float(metric(output, targets)) for n, metric in metrics.items()}
            except Exception as error:
                raise WorkerError(f"the {data} can't be scored: {type(error).__name__}: {error}") from error
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value * len(indices)
        count = sum(len(indices) for _, indices in chunks)
        return {name: total / count if math.isfinite(total) else total for name, total in sums.items()}


def _chunks(program: Program, data: Data, indices: NDArray[np.int64]) -> list[Chunk]:
    fetch = fetcher(data, program.loader, whole=program.model_makes_loss)
    # A model that makes its loss may return scores of each word beside it, and pads a batch to its longest sample.
    size = min(CHUNK, program.per_replica_batch(1)) if program.model_makes_loss else CHUNK
    return [(fetch, indices[start : start + size]) for start in range(0, len(indices), size)]


class EvaluationQueue:
    """Snapshots to evaluate, oldest first, and the evaluator of this process, built when it is first needed.

    Args:
        program: of the run.
        snapshot_bytes: size of one snapshot.
        build: builds the evaluator's model; None: as the program does.
        device: on which this process evaluates.
    """

    def __init__(
        self,
        program: Program,
        snapshot_bytes: int,
        build: Callable[[], nn.Module] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._program, self._build, self._device = program, build or program.build, device
        self._capacity = max(1, int(QUEUE_SHARE * available_bytes() / max(1, snapshot_bytes)))
        self.snapshots: deque[tuple[FlatState, SnapshotInfo]] = deque()
        """No one writes to a state in it."""
        self._evaluator: Evaluator | None = None

    @property
    def full(self) -> bool:
        """Return whether the run has to wait for the evaluator."""
        return len(self.snapshots) >= self._capacity

    def evaluate(self, state: FlatState, info: SnapshotInfo) -> Record:
        """Evaluate a snapshot in this process."""
        if self._evaluator is None:
            self._evaluator = Evaluator(self._program, self._build(), self._device)
        return self._evaluator.score(state, info)

    def evaluate_all(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Evaluate what is queued in this process, until there is no more or that is cancelled."""
        while self.snapshots and not cancelled():
            yield self.evaluate(*self.snapshots.popleft())


def become_evaluator(*, idle_only: bool) -> None:
    """Make this process an evaluator: one thread and, if ``idle_only``, cycles that no other process wants."""
    torch.set_num_threads(1)
    if idle_only:  # so that evaluation never bends the timing of the replicas
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
