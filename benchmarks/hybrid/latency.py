"""A single sample through a model: one process, shards and stages by turns, each asked again and again.

What is timed is a call of :func:`paceline.predictor` from the asker's side, whose workers have been there for a while.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from kit.blocks import Attention, Perceptron, Residual
from kit.machine import machine
from kit.turns import timed
from torch import Tensor, nn

import paceline

ONE = "replicas=1"
WAYS = {ONE: "replicas=1 threads=1", "shards=2": "shards=2 threads=1", "stages=2": "stages=2 threads=1"}
"""Of replicas, one answers: so one of two is as quick as one alone."""

SEED = 4
IN_A_ROW = 15

CLOSE = 1e-4
"""How far an output may be from one process's, of its largest element: sums of a thousand products in another order."""


class Asked(NamedTuple):
    """A model, and the shape of a sample."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


MODELS = {
    "perceptron, 1024 wide": Asked(functools.partial(Perceptron, 1024), (1024,)),
    "transformer layers, 256 wide": Asked(lambda: nn.Sequential(*(Attention(256, 8) for _ in range(4))), (64, 256)),
    "bottlenecks, 256 channels": Asked(lambda: nn.Sequential(*(Residual(256) for _ in range(4))), (256, 28, 28)),
    "tiny": Asked(functools.partial(Perceptron, 8), (8,)),
}
"""By name; the last one is for trying the benchmark itself."""


def rows(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each way.

    Raises:
        ArithmeticError: one gives something else than one process.
    """
    model = MODELS[name]
    sample = torch.randn(1, *model.shape, generator=torch.Generator().manual_seed(SEED))
    with ExitStack() as closing:
        asks = {way: closing.enter_context(paceline.predictor(_program(model), WAYS[way])) for way in WAYS}
        _check(name, {way: ask(sample) for way, ask in asks.items()})
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds):
            for way in list(WAYS)[:: -1 if turn % 2 else 1]:
                each = [timed(functools.partial(asks[way], sample)) for _ in range(IN_A_ROW + 1)]
                taken[way].append(statistics.median(each[1:]))
    for way, times in taken.items():
        of_one = statistics.median(a / b for a, b in zip(times, taken[ONE], strict=True))
        found = {"call_ms": f"{1e3 * statistics.median(times):.3f}", "of_one": f"{of_one:.3f}", "rounds": rounds}
        yield {"model": name, "way": way, **found} | machine()


def _program(model: Asked) -> paceline.Program:
    """Nobody trains it."""
    none = torch.zeros(4, *model.shape)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    return paceline.Program(
        model=model.make, loss=nn.functional.mse_loss, optimizer=optimizer, train=(none, none), batch_size=2, seed=SEED
    )


def _check(name: str, outputs: Mapping[str, Tensor]) -> None:
    expected = outputs[ONE]
    for way, output in outputs.items():
        apart = float((output - expected).abs().max() / expected.abs().max())
        if not apart <= CLOSE:
            raise ArithmeticError(f"{name}, {way}: {apart:g} from one process, of its largest; allowed: {CLOSE}")
