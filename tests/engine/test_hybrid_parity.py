"""Replicas of stages of shards compute what one process computes, parameter by parameter."""

import functools
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from paceline.core.errors import WorkerError
from paceline.engine.local.engine import LocalEngine
from tests.engine.distributed_cases import kept
from tests.engine.hybrid_cases import CASES, NORMALISED
from tests.engine.local import leaks
from tests.engine.pipeline_cases import ADAM
from tests.ranks import Play

pytest.importorskip("transformers", reason="models of transformers are looked at where it is installed")

ROUNDING = 1e-12
"""Both sides add the same products, but a sum over samples, or over what is divided, in another order."""

SCALED = 1e-9
"""Adam divides a gradient by its own size, which makes its relative error that of A, also where it is nearly zero. So
does a BatchNorm of few samples with what comes before it."""

MESH = "replicas=2 stages=2 shards=2"
RANKS = 8


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, play: Play) -> Path:
    """Where eight ranks left what they found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("hybrid_parity_script.py")
    play(script, "distributed:gloo", MESH, size=RANKS, folder=folder)
    return folder


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=bound, msg=lambda said, n=name: f"{n}: {said}")


def assert_moved(found: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Most weights; behind a ReLU that lets nothing through some stay."""
    weights = [name for name, value in before.items() if value.dim() > 1 and value.is_floating_point()]
    moved = [name for name in weights if float((found[name] - before[name]).abs().max()) > 1e-4]
    assert len(moved) > len(weights) / 2


def expected_of(name: str, engine: LocalEngine) -> Mapping[str, Tensor]:
    """By one process; or, where each micro-batch is normalised by itself, by pipelines whose operators are whole."""
    run = CASES[name].one_process() if name in CASES else NORMALISED[name].run("replicas=2 stages=2", engine)
    assert run.model is not None
    return run.model.state_dict()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES | NORMALISED)
def test_replicas_of_stages_of_shards_equal_one_process(started: Path, engine: LocalEngine, name: str) -> None:
    program = (CASES | NORMALISED)[name].program()
    expected = expected_of(name, engine)
    scaled = program.optimizer is ADAM or name in NORMALISED
    whole = sum(p.nbytes for p in program.build().parameters())
    for found, told in kept(started, name, RANKS):
        assert not told["interrupted"]
        compare(found, expected, SCALED if scaled else ROUNDING)
        assert_moved(found, program.build().state_dict())
        assert max(told["bytes"]) < whole


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("tied", "replicas=2 stages=2 shards=2"),
        ("encoder", "replicas=2 stages=2 shards=[2,1]"),
        ("adam", "replicas=2 stages=2 shards=[1,2]"),
        ("tied", "replicas=2 shards=2"),
    ],
)
def test_the_local_engine_starts_all_of_them_itself(engine: LocalEngine, name: str, mesh: str) -> None:
    case = CASES[name]
    run = case.run(mesh, engine)
    assert run.model is not None
    compare(run.model.state_dict(), expected_of(name, engine), SCALED if name == "adam" else ROUNDING)
    assert_moved(run.model.state_dict(), case.program().build().state_dict())
    assert len(run.summary["utilisation"]) == paceline.Strategy.parse(mesh).workers


def test_stages_that_share_a_weight_have_as_many_shards(engine: LocalEngine) -> None:
    with pytest.raises(paceline.InputError, match="is shared by stages of 1 and of 2 shards; write the same number"):
        CASES["tied"].run("stages=2 shards=[2,1]", engine, steps=1)


def loop(worker: Any, rank: int, step: int) -> None:
    for made, batch in enumerate(worker.batches(), start=1):
        if made == step and os.environ["RANK"] == str(rank):
            signal.raise_signal(signal.SIGKILL)
        worker.step(batch)


@pytest.mark.timeout(120)
def test_a_killed_rank_ends_the_run_with_one_error(engine: LocalEngine) -> None:
    rank, before = 5, leaks.files()
    killed = functools.partial(loop, rank=rank, step=3)
    with pytest.raises(WorkerError) as raised:
        paceline.launch(
            killed, CASES["adam"].program(), f"{MESH} micro_batches=2", engine=engine, steps=50, progress=False
        )
    assert re.search(rf"rank {rank} \(process \d+ on .*\) ended while rank \d ", str(raised.value)), raised.value
    assert not leaks.since(before)
