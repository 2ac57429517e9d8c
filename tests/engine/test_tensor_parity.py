"""A replica of shards computes what one process computes, parameter by parameter, and each holds only its part."""

import functools
import gc
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.engine.local.engine import LocalEngine
from tests import zoo
from tests.engine.distributed_cases import kept
from tests.engine.tensor_cases import ADAM, CASES, MOMENTUM, Case
from tests.ranks import Play, cases_of

ROUNDING = 1e-12
"""Both sides add the same products, but a sum over what is divided in another order."""

NORMALISED = 1e-9
"""Adam divides a gradient by its own size, which makes its relative error that of A, also where it is nearly zero. So
does a BatchNorm of few samples with what comes before it."""

HALF = 2.0**-5
"""Of the farthest move of a tensor's elements, in bf16, where a rounding is 2^-9: a sum over a divided dim is rounded
once for each shard and once for all of them, forward and backward, in each of three layers."""


@pytest.fixture(scope="module", params=[(2, "distributed:gloo"), (3, "distributed:shm")])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Play) -> tuple[int, Path]:
    """How many ranks were started, and where they left what they found."""
    ranks, engine = request.param
    folder: Path = tmp_path_factory.mktemp("ranks")
    play(Path(__file__).with_name("tensor_parity_script.py"), engine, cases_of(request), size=ranks, folder=folder)
    return ranks, folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(started: tuple[int, Path], name: str) -> None:
    shards, folder = started
    program, expected = CASES[name].program, CASES[name].one_process().state
    before = program.build().state_dict()
    bound = ROUNDING if program.optimizer is MOMENTUM and name != "batchnorm" else NORMALISED
    for found, told in kept(folder, name, shards):
        assert not told["interrupted"]
        assert max(told["bytes"]) <= told["bound"] < sum(p.nbytes for p in program.build().parameters())
        assert told["differing"] == []
        for tensor, value in expected.items():
            moved = float((value - before[tensor]).abs().max()) if value.is_floating_point() else 0.0
            allowed = HALF * moved if name == "autocast" else bound
            close(found[tensor], value, allowed, tensor)
        assert_moved(found, expected, before)


def close(found: Tensor, expected: Tensor, bound: float, name: str) -> None:
    assert found.isfinite().all(), name
    torch.testing.assert_close(found, expected, rtol=0, atol=bound, msg=lambda said: f"{name}: {said}")


def assert_moved(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """All that a loss depends on; a bias before a BatchNorm stays, and so does what is idle."""
    for name, value in expected.items():
        farthest = float((value - before[name]).abs().max())
        assert farthest > 1e-4 or name.startswith("idle.") or value.dim() == 1, name
        assert farthest < 1e-4 or not torch.equal(found[name], before[name]), name


def test_the_local_engine_starts_the_shards_itself(engine: LocalEngine) -> None:
    """And scores in the middle of training what one process has there."""
    inputs, targets = zoo.mlp().inputs, zoo.mlp().targets
    case = Case(zoo.mlp, fields={"optimizer": ADAM, "test": (inputs.flip(0) * 2, targets.flip(0))})
    run, expected = (how(evaluate_every=2) for how in (functools.partial(case.run, 2, engine), case.one_process))
    for name, value in expected.state.items():
        close(run.state[name], value, NORMALISED, name)
    assert len(run.history) == len(expected.history) == 4
    for mine, theirs in zip(run.history, expected.history, strict=True):
        assert mine.updates == theirs.updates
        assert mine.test_loss == pytest.approx(theirs.test_loss, abs=NORMALISED)
    assert len({record.test_loss for record in run.history}) == 4
    assert run.summary["utilisation"] == [None, None]


def test_what_is_saved_is_whole_and_goes_on_in_another_number_of_shards(engine: LocalEngine, tmp_path: Path) -> None:
    case = Case(zoo.mlp)
    run = case.run(3, engine)
    run.save(tmp_path / "run")
    saved = paceline.load(tmp_path / "run", case.program).model
    assert saved is not None
    assert run.model is not None
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in run.model.state_dict().items())
    onward = replace(case.program, model=functools.partial(trained, tmp_path / "run", case.program))
    again = paceline.train(onward, "shards=2", engine=engine, steps=3, progress=False)
    expected = paceline.train(onward, "replicas=1", engine="virtual", steps=3, progress=False)
    for name, value in expected.state.items():
        close(again.state[name], value, ROUNDING, name)
        assert not torch.equal(again.state[name], run.state[name])


def trained(folder: Path, program: paceline.Program) -> nn.Module:
    model = paceline.load(folder, program).model
    assert model is not None
    return model


# ------------------------------------------------------------------------------------------------------------ memory

ROWS, COLUMNS = 48, 24
"""Of the weight that is divided: more than half of all parameters."""


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Tanh(), nn.Linear(ROWS, 3)).double()


def looking(worker: Any) -> None:
    """Trains, and fails where shard 1 has the whole weight; shard 0 has a copy of A_0, to score it in the end."""
    for made, batch in enumerate(worker.batches(), start=1):
        worker.step(batch)
        if made == 3 and os.environ["RANK"] == "1":
            gc.collect()
            tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.is_floating_point()]
            whole = [t for t in tensors if tuple(t.shape) == (ROWS, COLUMNS) and t.untyped_storage().nbytes()]
            parts = [t for t in tensors if tuple(t.shape) in ((ROWS // 2, COLUMNS), (ROWS, COLUMNS // 2))]
            if whole or not parts:
                raise ValueError(f"of the weight it holds {len(whole)} whole ones, and {len(parts)} parts")


def test_no_process_has_the_memory_of_what_is_divided(engine: LocalEngine) -> None:
    inputs = torch.randn(8, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    program = paceline.Program(
        model=wide, loss=nn.functional.cross_entropy, optimizer=MOMENTUM, train=(inputs, torch.arange(8) % 3)
    )
    run = paceline.launch(looking, program, "shards=2", engine=engine, steps=4, evaluate_every=4, progress=False)
    weights = sum(p.nbytes for p in wide().parameters())
    assert all(held < 0.6 * weights for held in run.summary["parameter_bytes"])


# -------------------------------------------------------------------------------------------------------------- spans


def test_what_the_shards_send_is_in_the_trace(engine: LocalEngine) -> None:
    """Two layers, columns and rows: one all-reduce forward and none backward, as the input has no gradient."""
    program = Case(zoo.mlp).program
    traced = paceline.train(program, "shards=2", engine=engine, steps=3, trace=True, progress=False)
    spans = [span for span in traced.spans if span.action == "all_reduce" and span.bytes]
    assert {(span.shard, span.step) for span in spans} >= {(shard, step) for shard in (0, 1) for step in (1, 2, 3)}
    passes = [span for span in traced.spans if span.action in ("forward", "backward")]
    for shard in (0, 1):
        within = [s for s in spans if s.shard == shard and any(inside(s, p) for p in passes if p.shard == shard)]
        assert len(within) == 3 * len([s for s in within if s.step == 1]) > 0
    assert traced.summary["notes"]["planned_bytes_per_step"] > 0
    assert Case(zoo.mlp).run(2, engine).spans == []


def inside(span: Any, whole: Any) -> bool:
    return bool(whole.start_ns <= span.start_ns and span.end_ns <= whole.end_ns)
