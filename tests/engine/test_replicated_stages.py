"""Pipelines at whose stages several workers take turns compute what one process computes, parameter by parameter."""

import functools
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import paceline
from paceline.core.errors import InputError, WorkerError
from paceline.engine.local.engine import LocalEngine
from tests import zoo
from tests.engine.distributed_cases import kept
from tests.engine.hybrid_cases import Case
from tests.engine.local import leaks
from tests.engine.pipeline_cases import ADAM, MOMENTUM
from tests.engine.replicated_cases import BATCH, CASES, OTHERS, one_process, trained
from tests.engine.test_hybrid_parity import assert_moved, compare
from tests.ranks import Play, cases_of

pytest.importorskip("transformers", reason="models of transformers are looked at where it is installed")

ROUNDING = 1e-12
"""Both sides add the same products, but a sum over samples in another order."""

SCALED = 1e-9
"""Adam divides a gradient by its own size, which makes its relative error that of A, also where it is nearly zero."""

MESHES = ["stages=[3,1]", "stages=[1,3]", "stages=[2,2]"]
DIVIDED = "stages=[2,1] shards=[1,2]"
"""Of four ranks each."""


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Play) -> Path:
    """Where four ranks left what they found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("replicated_parity_script.py")
    play(script, "distributed:gloo", cases_of(request), *MESHES, DIVIDED, size=4, folder=folder)
    return folder


@functools.cache
def expected_of(name: str) -> paceline.Run:
    return one_process((CASES | OTHERS)[name])


def state_of(run: paceline.Run) -> Mapping[str, Tensor]:
    assert run.model is not None
    return run.model.state_dict()


def check(found: Mapping[str, Tensor], loss: float, name: str) -> None:
    """A, that it has moved, and the loss."""
    case, expected = (CASES | OTHERS)[name], expected_of(name)
    compare(found, state_of(expected), SCALED if case.program().optimizer is ADAM else ROUNDING)
    assert_moved(found, case.program().build().state_dict())
    assert loss == pytest.approx(expected.summary["train_loss"], abs=1e-9)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "mesh"), [*((name, mesh) for mesh in MESHES for name in CASES), ("encoder", DIVIDED)])
def test_stages_at_which_several_take_turns_equal_one_process(started: Path, name: str, mesh: str) -> None:
    for found, loss in kept(started, f"{name} {mesh}", 4):
        check(found, loss, name)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("encoder", "stages=[2,1]"),
        ("tied", "replicas=2 stages=[2,1]"),
        ("tied", "stages=[3]"),
        ("accumulated", "stages=[3,1] micro_batches=4"),
        ("accumulated", "replicas=2 stages=[1,2]"),
        ("all forward first", "stages=[1,2,1]"),
        ("one at a time", "stages=[2,1]"),
        ("adam", "stages=[1,2] micro_batches=2"),
        ("tied", "stages=[2,1] shards=2"),
        ("encoder", "replicas=2 stages=[2,1] shards=[2,1]"),
    ],
)
def test_the_local_engine_starts_all_of_them_itself(engine: LocalEngine, name: str, mesh: str) -> None:
    run = trained((CASES | OTHERS)[name], mesh, engine)
    check(state_of(run), run.summary["train_loss"], name)
    assert len(run.summary["utilisation"]) == paceline.Strategy.parse(mesh).workers


AT = "cuts=layers.layers.2"


def test_masks_are_those_of_stages_of_one_column(engine: LocalEngine) -> None:
    """A mask depends on the micro-batch and the part, not on who computes it."""
    model, inputs, targets, loss = zoo.encoder()
    program = paceline.Program(
        model=model, loss=loss, optimizer=MOMENTUM, train=(inputs, targets), batch_size=BATCH, seed=5
    )
    runs = [
        paceline.train(program, f"stages={stages} micro_batches=4 {AT}", engine=engine, steps=3, progress=False)
        for stages in ("2", "[3,1]")
    ]
    compare(state_of(runs[1]), state_of(runs[0]), ROUNDING)
    without = trained(OTHERS["encoder"], f"stages=2 micro_batches=4 {AT}", engine, steps=3)
    assert runs[0].summary["train_loss"] != pytest.approx(without.summary["train_loss"], abs=1e-6)


@pytest.mark.parametrize("mesh", ["stages=[3,1]", "stages=[1,2]", "replicas=2 stages=[2,1]"])
def test_running_statistics_are_those_of_the_whole_mini_batch(engine: LocalEngine, mesh: str) -> None:
    """Of all replicas their mean, as between replicas of stages of one column."""
    case = Case(zoo.cnn, "batchnorm=mini-batch micro_batches=4 cuts=1", {"clip_norm": 0.5})
    replicas = "replicas=2 " if "replicas" in mesh else ""
    found, expected = (trained(case, each, engine) for each in (mesh, f"{replicas}stages=2"))
    compare(state_of(found), state_of(expected), SCALED)
    names = [name for name in state_of(found) if name.endswith("running_mean")]
    assert len(names) == 2
    assert all(float(state_of(found)[name].abs().max()) > 1e-3 for name in names)


def test_running_statistics_of_micro_batches_are_refused(engine: LocalEngine) -> None:
    case = Case(zoo.cnn)
    with pytest.raises(InputError, match=r"stage 0 moves with each micro-batch.* 2 take turns .*batchnorm=mini-batch"):
        trained(case, "stages=[2,1] cuts=1", engine, steps=1)
    assert trained(case, "stages=[1,2] cuts=2", engine, steps=1).summary["updates"] == 1  # none where turns are taken


@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 1.0), ("gpipe", 0.5)])
def test_what_each_keeps_for_backward(engine: LocalEngine, schedule: str, share: float) -> None:
    """Under 1F1B two micro-batches, as a first stage of one column does; of all m two columns keep half each."""
    words = f"micro_batches=4 {AT} schedule={schedule}"
    alone, turns = (
        trained(OTHERS["encoder"], f"stages={stages} {words}", engine, steps=1).summary["peak_saved_bytes"]
        for stages in ("2", "[2,1]")
    )
    assert turns == [alone[0] * share, alone[0] * share, alone[1]]


def test_a_step_is_recorded_by_column(engine: LocalEngine) -> None:
    run = trained(CASES["tied"], "stages=[2,1] micro_batches=4", engine, trace=True, steps=1)
    forwards = {(s.stage, s.shard, s.micro_batch) for s in run.spans if s.action == "forward"}
    assert forwards == {(0, 0, 0), (0, 1, 1), (0, 0, 2), (0, 1, 3), *((1, 0, i) for i in range(4))}


@pytest.mark.parametrize(
    "words", ["schedule=zero-bubble", "schedule=interleaved micro_batches=4", "schedule=pipedream"]
)
def test_schedules_that_take_no_turns_are_refused(words: str) -> None:
    with pytest.raises(InputError, match=r"stages=\[2, 1\]: several .* take turns .* write schedule=1f1b, or stages=2"):
        trained(CASES["tied"], f"stages=[2,1] {words}", "local", steps=1)


def test_fewer_micro_batches_than_columns_are_refused() -> None:
    with pytest.raises(InputError, match=r"micro_batches=1: 2 workers take turns .* write micro_batches=8"):
        trained(CASES["tied"], "stages=[2,1] micro_batches=1", "local", steps=1)


def test_replicas_that_are_waited_for_one_by_one(engine: LocalEngine) -> None:
    """Each part of A is written once, though two have it; with K = P that is synchronous training."""
    run = trained(CASES["tied"], "replicas=2 stages=[2,1] aggregation=buffered:k=2", engine)
    check(state_of(run), run.summary["train_loss"], "tied")


def test_steps_of_a_replica_of_its_own(engine: LocalEngine) -> None:
    """What is clipped by its norm counts once, though two have it."""
    program, words = CASES["tied"].program(batch_size=BATCH), "aggregation=local-steps:period=2"
    found = paceline.train(program, f"stages=[2,1] {words}", engine=engine, steps=2, progress=False)
    expected = paceline.train(program, f"replicas=1 {words}", engine="virtual", steps=2, progress=False)
    compare(state_of(found), state_of(expected), ROUNDING)
    assert_moved(state_of(found), program.build().state_dict())


def test_stages_that_share_a_weight_have_as_many_shards(engine: LocalEngine) -> None:
    with pytest.raises(InputError, match="is shared by stages of 1 and of 2 shards; write the same number"):
        trained(CASES["tied"], DIVIDED, engine, steps=1)


def loop(worker: Any, rank: int, step: int) -> None:
    for made, batch in enumerate(worker.batches(), start=1):
        if made == step and os.environ["RANK"] == str(rank):
            signal.raise_signal(signal.SIGKILL)
        worker.step(batch)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rank", [1, 3])
def test_a_killed_worker_ends_the_run_with_one_error(engine: LocalEngine, rank: int) -> None:
    before = leaks.files()
    killed = functools.partial(loop, rank=rank, step=3)
    program = CASES["tied"].program(batch_size=BATCH)
    with pytest.raises(WorkerError) as raised:
        paceline.launch(killed, program, "stages=[3,1]", engine=engine, steps=50, progress=False)
    assert re.search(rf"rank {rank} \(process \d+ on .*\) ended while rank \d ", str(raised.value)), raised.value
    assert not leaks.since(before)
