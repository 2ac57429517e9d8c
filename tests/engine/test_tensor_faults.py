"""A shard that is killed, raises or hangs: one error that says which and when, at once, and nothing is left behind."""

import functools
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.engine.local.engine import LocalEngine
from tests.engine import programs
from tests.engine.local import leaks

SHARDS = 3
AT = 4
"""The step in which it happens."""


def loop(worker: Any, rank: int, do: Callable[[], None]) -> None:
    for made, batch in enumerate(worker.batches(), start=1):
        if made == AT and os.environ["RANK"] == str(rank):
            do()
        worker.step(batch)


def signalled(number: int) -> None:
    signal.raise_signal(number)


def torn() -> None:
    raise ValueError("the tape is torn")


def failed(engine: LocalEngine, kind: type[PacelineError], what: Any, **settings: Any) -> str:
    """What a run raises, which leaves no process and no file behind."""
    before = leaks.files()
    program = settings.pop("program", programs.program())
    with pytest.raises(kind) as raised:
        paceline.launch(what, program, f"shards={SHARDS}", engine=engine, steps=100, progress=False, **settings)
    fork_server = engine._fork_server
    assert fork_server is not None
    assert not fork_server._children
    assert not leaks.since(before)
    return str(raised.value)


def others(shard: int) -> str:
    return " and ".join(str(other) for other in range(SHARDS) if other != shard)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shard", [0, 2])
def test_a_killed_shard(engine: LocalEngine, shard: int) -> None:
    said = failed(engine, WorkerError, functools.partial(loop, rank=shard, do=functools.partial(signalled, 9)))
    found = re.search(
        rf"rank {shard} \(process \d+ on .*\) ended while rank (\d) .* waited for .*, from shard (.*) for shard (\d) "
        rf"in step {AT}",
        said,
    )
    assert found is not None, said
    assert found[1] == found[3] != str(shard)
    assert found[2] == others(int(found[3]))


@pytest.mark.timeout(60)
def test_a_shard_that_hangs(engine: LocalEngine) -> None:
    stop = functools.partial(loop, rank=1, do=functools.partial(signalled, signal.SIGSTOP))
    said = failed(engine, WaitTimeoutError, stop, timeout_s=4)
    assert re.search(rf"waited 4 s for rank 1 \(process .*, from shard .* for shard [02] in step {AT}", said), said


@pytest.mark.timeout(60)
def test_a_loop_that_raises_on_one_shard(engine: LocalEngine) -> None:
    said = failed(engine, WorkerError, functools.partial(loop, rank=2, do=torn))
    assert said.startswith(
        f"rank 2 (replica 0, stage 0, shard 2) failed at its step {AT}: ValueError: the tape is torn\n\nTraceback"
    )
    assert "in torn\n    raise ValueError" in said


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 6), nn.Flatten(), nn.Linear(12, 3)).double()


def growing(replica: int, replicas: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The fourth batch has a word that the table does not have."""
    del replica, replicas
    generator = torch.Generator().manual_seed(seed)
    for made in range(1, 200):
        words = torch.randint(6, (4, 2), generator=generator)
        yield words + 100 * (made == AT), torch.arange(4) % 3


def plain(worker: Any) -> None:
    for batch in worker.batches():
        worker.step(batch)


@pytest.mark.timeout(60)
def test_an_operator_that_raises(engine: LocalEngine) -> None:
    broken = replace(programs.program(), model=table, train=growing, test=None)
    said = failed(engine, WorkerError, plain, program=broken)
    assert re.match(rf"shard \d, step {AT}: IndexError: index out of range", said), said
