"""Gradients of large tensors are stepped on where a backward pass has left them: as exact as from a slot."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import paceline
from paceline.engine.local.engine import LocalEngine
from tests import zoo
from tests.engine.tensor_cases import ADAM, STEPS, Case

WIDTH = 240
"""So that a tensor of a half has more than 4,096 elements on average."""

DECAYING = functools.partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def large() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5)
    ).double()


def job() -> zoo.Job:
    return zoo.mlp()._replace(model=large)


def with_holes() -> zoo.Job:
    """The last sample has no finite gradient."""
    made = job()
    inputs = made.inputs.clone()
    inputs[-1] = float("nan")
    return made._replace(inputs=inputs)


def looking(loose: bool, worker: Any) -> None:
    """Trains, and fails where gradients are not where they are expected."""
    found = worker._replica._inner._handoff
    if (found is not None) != loose:
        raise ValueError(f"gradients lie in {found}")
    for batch in worker.batches():
        worker.step(batch)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("case", "loose"),
    [
        (Case(job, "accumulate=2", {"optimizer": DECAYING}), True),
        (Case(job, fields={"optimizer": ADAM}), True),
        (Case(job, fields={"optimizer": functools.partial(torch.optim.RMSprop, lr=0.001)}), False),
        (Case(job, fields={"clip_norm": 0.1}), False),
        (Case(zoo.mlp), False),
    ],
    ids=["momentum", "adam", "torch.optim's", "clipped", "small"],
)
def test_equals_one_process(engine: LocalEngine, case: Case, loose: bool) -> None:
    loop = functools.partial(looking, loose)
    run = paceline.launch(loop, case.program, f"shards=2 {case.strategy}", engine=engine, steps=STEPS, progress=False)
    start = case.program.build().state_dict()
    for name, value in case.one_process().state.items():
        torch.testing.assert_close(run.state[name], value, rtol=0, atol=1e-9)
        assert float((run.state[name] - start[name]).abs().max()) > 1e-5, name


@pytest.mark.timeout(120)
def test_what_is_kept_for_backward_is_counted(engine: LocalEngine) -> None:
    """Of 4 samples a half of each hidden output, the whole first one, and a loss's few numbers; no parameter."""
    run = Case(job).run(2, engine)
    half = 4 * WIDTH // 2 * 8
    assert all(4 * half <= found < 5 * half for found in run.summary["peak_saved_bytes"])
    assert len(run.summary["peak_saved_bytes"]) == 2
    assert not {"bubble", "pipeline_utilisation"} & run.summary.keys()


@pytest.mark.timeout(120)
def test_what_is_not_finite_is_discarded(engine: LocalEngine) -> None:
    case = Case(with_holes, fields={"optimizer": DECAYING})
    run = case.run(2, engine, on_nonfinite="skip")
    expected = case.one_process(on_nonfinite="skip")
    assert run.summary["nonfinite"] == expected.summary["nonfinite"] > 0
    for name, value in expected.state.items():
        assert value.isfinite().all()
        torch.testing.assert_close(run.state[name], value, rtol=0, atol=1e-9)


@pytest.mark.timeout(120)
def test_what_is_not_finite_ends_the_run(engine: LocalEngine) -> None:
    case = Case(with_holes, fields={"optimizer": DECAYING})
    with pytest.raises(paceline.PacelineError, match="not finite"):
        case.run(2, engine)
