"""What the integrations share: batches in whole rounds, and the step of an optimizer that a framework calls."""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from paceline.core.errors import InputError
from paceline.engine.worker import TrainingEnded, Worker

LOG = logging.getLogger("paceline")


class Rounds:
    """This replica's batches of a loader, as many on all replicas: of P a round, in whole rounds.

    A framework makes ``len`` steps a pass, with a schedule over all of them, and asks for no further batch. So batches
    of a last round that has fewer than P are left out of the pass, as ``drop_last`` leaves out samples.

    Args:
        worker: the replica.
        loader: of all replicas' batches; attributes that this has not are its.

    Raises:
        InputError: it has no whole round.
    """

    def __init__(self, worker: Worker, loader: Any) -> None:
        self._loader, self._replicas = loader, worker.replicas
        try:
            count = len(loader)
        except TypeError:  # a stream, whose end is seen when it comes
            self._batches = worker.data(_Whole(loader, worker.replicas))
            return
        self._batches = worker.data(loader)
        if count < self._replicas:
            raise InputError(
                f"a pass has {count} batches, fewer than the {self._replicas} replicas; write a smaller batch size"
            )
        if count % self._replicas and worker.replica == 0:
            LOG.warning(
                "%d of %d batches are left out of each pass: %d replicas take one each",
                count % self._replicas, count, self._replicas,
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._loader) // self._replicas

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._batches.loader, _Whole):
            return iter(self._batches)
        return itertools.islice(iter(self._batches), len(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # copies and pickles ask before there is a loader
            raise AttributeError(name)
        return getattr(self._loader, name)


@dataclass(frozen=True)
class _Whole:
    """The whole rounds of a stream of batches."""

    loader: Any
    replicas: int

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while len(round_ := list(itertools.islice(batches, self.replicas))) == self.replicas:
            yield from round_


@contextlib.contextmanager
def stepping(optimizer: Optimizer, end: Callable[[], None]) -> Iterator[None]:
    """Context manager: a joined optimizer as frameworks call it.

    ``step(closure)`` evaluates the closure, once, before it makes the step.

    Args:
        optimizer: within its ``paceline.join``.
        end: has the framework end its training; called where the budget is spent.
    """
    joined = optimizer.step

    def step(closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        try:
            joined()
        except TrainingEnded:
            end()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as schedulers ask, who would wrap it again
    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        optimizer.step = joined  # type: ignore[method-assign]
