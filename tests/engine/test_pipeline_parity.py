"""A pipeline computes what one process computes that goes through the same micro-batches, parameter by parameter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import train
from paceline.engine.local.engine import LocalEngine
from tests.engine import programs
from tests.engine.distributed_cases import kept
from tests.engine.pipeline_cases import ADAM, CASES, one_process
from tests.ranks import Play, cases_of

pytest.importorskip("transformers", reason="models of transformers are looked at where it is installed")

ROUNDING = 1e-12
"""Both sides add the same products; a few of them in another order, as a gradient's of several consumers."""

NORMALISED = 1e-9
"""Adam divides a gradient by its own size, which makes its relative error that of A, also where it is nearly zero."""


@pytest.fixture(scope="module", params=[(2, "distributed:gloo"), (3, "distributed:shm")])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Play) -> tuple[int, Path]:
    """How many ranks were started, and where they left what they found."""
    ranks, engine = request.param
    folder: Path = tmp_path_factory.mktemp("ranks")
    play(Path(__file__).with_name("pipeline_parity_script.py"), engine, cases_of(request), size=ranks, folder=folder)
    return ranks, folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(started: tuple[int, Path], name: str) -> None:
    stages, folder = started
    program = CASES[name].program
    expected = one_process(program, micro_batches=2 * stages)
    bound = NORMALISED if program.optimizer is ADAM else ROUNDING
    for found, told in kept(folder, name, stages):
        assert not told["interrupted"]
        compare(found, expected, bound)


def compare(found: dict[str, Any], expected: dict[str, torch.Tensor], bound: float) -> None:
    """All that a state_dict has, which leaves out buffers that a model makes anew."""
    for name, value in expected.items():
        if name not in found and not value.is_floating_point():
            continue
        torch.testing.assert_close(found[name], value, rtol=0, atol=bound, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.parametrize(("name", "stages"), [("mlp", 1), ("mlp", 3), ("gpt2", 2)])
def test_the_local_engine_starts_the_stages_itself(engine: LocalEngine, stages: int, name: str) -> None:
    case = CASES[name]
    run = case.run(stages, engine, more=f"micro_batches={2 * stages}")
    compare(run.model.state_dict(), one_process(case.program, micro_batches=2 * stages), NORMALISED)
    assert len(run.summary["utilisation"]) == stages


@pytest.mark.parametrize("mesh", ["stages=2", "replicas=2 stages=2 aggregation=asynchronous"])
def test_waits_for_other_stages_are_no_work(engine: LocalEngine, mesh: str) -> None:
    run = train(programs.program(), mesh, engine=engine, steps=10, trace=True, progress=False)
    end_s = max(span.end_ns for span in run.spans) * 1e-9
    for number, share in enumerate(run.summary["utilisation"]):
        place = divmod(number, 2)
        own = [span for span in run.spans if (span.replica, span.stage) == place and span.action == "wait"]
        waited_s = sum(span.end_ns - span.start_ns for span in own) * 1e-9
        assert 0 < share < 1
        # Half of the waits, since a worker may come to its first step and end its last one a little late.
        assert share * run.summary["seconds"] < end_s - waited_s / 2


def test_a_stage_may_have_nothing_to_train(engine: LocalEngine) -> None:
    """Also of several batches, whose gradients are divided."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Tanh(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    program, strategy = programs.program(model=model), "micro_batches=2 accumulate=2"
    one, two = (
        train(program, f"stages={stages} {cut} {strategy}", engine=engine, steps=3, progress=False)
        for stages, cut in ((1, ""), (2, "cuts=1"))
    )
    assert two.summary["parameter_bytes"][0] == 0
    compare(two.state, one.state, ROUNDING)
