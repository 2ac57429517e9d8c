"""Scores a snapshot of A: losses and metrics on the test set and on a fixed sample of the training set."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.comm.linux import available_bytes
from paceline.core.errors import WorkerError
from paceline.core.records import Record
from paceline.core.types import Seconds
from paceline.program import Data, Program, Tree, call, is_source, length
from paceline.replica.batches import Fetch, fetcher
from paceline.replica.flat_state import FlatState, write

TRAIN_SAMPLE = 2048
"""How many training samples the training loss is taken on, the same ones for every strategy and round."""

CHUNK = 1024
"""Samples in one forward pass."""

Metrics: TypeAlias = Mapping[str, Callable[[Tree, Tree], Any]]
"""name -> (output, target) -> mean."""

SHARE = 0.25
"""Of the memory that is free: what waits to be scored may fill it; then the run waits for the scorer."""

_TAG = int.from_bytes(b"training sample")


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The counts of a run when a snapshot was taken; with scores it becomes a record."""

    time_s: Seconds
    updates: int
    gradients: int
    threshold: int
    staleness_mean: float | None
    recent_loss: float | None
    """Mean loss of the Δs that arrived lately: the training loss where there is no training set to sample."""
    statistics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Of gradients, where that was asked for."""


def room(nbytes: int) -> int:
    """How many snapshots of so many bytes may wait to be scored."""
    return max(1, int(SHARE * available_bytes() / max(1, nbytes)))


class Evaluator:
    """Scores states of one program.

    Args:
        program: gives the data, loss and metrics (resolved: not None).
        module: an instance of the model that the scorer may use up.
    """

    def __init__(self, program: Program, module: nn.Module) -> None:
        self._program, self._module = program, module.eval()
        self._metrics = dict(program.metrics or {})
        self._test = _whole(program.test, program.loader) if program.test is not None else []
        self._train = [] if is_source(program.train) else _sample(cast(Data, program.train), program.loader)

    @property
    def module(self) -> nn.Module:
        """The model, with the values scored last."""
        return self._module

    def score(self, state: FlatState, moment: SnapshotInfo) -> Record:
        """The record of one snapshot."""
        write(self._module, state)
        train = self._mean("training sample", self._train, {}).get("loss", moment.recent_loss)
        test = self._mean("test set", self._test, self._metrics)
        return Record(
            time_s=moment.time_s,
            updates=moment.updates,
            gradients=moment.gradients,
            threshold=moment.threshold,
            staleness_mean=moment.staleness_mean,
            train_loss=train,
            test_loss=test.pop("loss", None),
            test_accuracy=test.pop("accuracy", None),
            test_metrics=test,
            statistics=moment.statistics,
        )

    def _mean(self, what: str, chunks: "list[_Chunk]", metrics: Metrics) -> dict[str, float]:
        """Means over all samples of the chunks, by name; what is not finite is left as it is."""
        sums: dict[str, float] = {}
        for chunk in chunks:
            try:
                values = self._values(chunk, metrics)
            except Exception as error:
                raise WorkerError(f"the {what} can't be scored: {type(error).__name__}: {error}") from error
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value * len(chunk.indices)
        count = sum(len(chunk.indices) for chunk in chunks)
        return {name: total / count if math.isfinite(total) else total for name, total in sums.items()}

    @torch.no_grad()
    def _values(self, chunk: "_Chunk", metrics: Metrics) -> dict[str, float]:
        inputs, targets = chunk.fetch(chunk.indices)
        with self._program.autocast("cpu"):
            output = call(self._module, inputs)
            loss = self._program.loss(output, targets)
        return {"loss": float(loss)} | {name: float(metric(output, targets)) for name, metric in metrics.items()}


@dataclass(frozen=True)
class _Chunk:
    fetch: Fetch
    indices: NDArray[np.int64]


def _whole(data: Data, loader: Mapping[str, object]) -> list[_Chunk]:
    return list(_chunks(data, loader, np.arange(length(data))))


def _sample(data: Data, loader: Mapping[str, object]) -> list[_Chunk]:
    chosen = np.random.default_rng(_TAG).permutation(length(data))[:TRAIN_SAMPLE]
    return list(_chunks(data, loader, np.sort(chosen)))


def _chunks(data: Data, loader: Mapping[str, object], indices: NDArray[np.int64]) -> Iterator[_Chunk]:
    fetch = fetcher(data, loader)
    for start in range(0, len(indices), CHUNK):
        yield _Chunk(fetch, indices[start : start + CHUNK])
