"""Worker processes compare what they have compiled on the first batch of each size, also where they know none before.

The last batch of an epoch has two of 50 samples, and its micro-batches one each. Inductor itself compiles in
test_compiled_engines.py; here ``aot_eager`` stands in for it, and a backend that errs.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from paceline import Program, train
from paceline.core.errors import InputError
from paceline.engine.local.engine import LocalEngine
from tests.engine import programs

COMPILE = torch.compile

STEPS = 14
"""An epoch, and a batch of the first size again."""


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    """An engine of this file alone, whose workers have imported the compiler."""
    with LocalEngine() as local:
        yield local


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore torch's own, which a model replaces in this process as well."""
    monkeypatch.setattr(torch, "compile", COMPILE)


def wrong_for(samples: int, graph: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
    """Compile what is 1 % off where a tensor has this many rows."""

    def run(*arguments: Any) -> Any:
        off = any(isinstance(each, Tensor) and each.dim() > 1 and len(each) == samples for each in arguments)
        return tuple(out * 1.01 if off and isinstance(out, Tensor) else out for out in graph(*arguments))

    return run


def compiled_by(backend: Any, model: Callable[[], nn.Module]) -> nn.Module:
    """Make a model, and have this process compile by a backend."""
    torch.compile = lambda function, options: COMPILE(function, backend=backend)  # type: ignore[assignment]
    return model()


def program(backend: Any, model: Callable[[], nn.Module], strategy: str) -> Program:
    fields = {} if "stages" in strategy or "shards" in strategy else {"train": batches}
    return programs.program(model=partial(compiled_by, backend, model), **fields)


def batches(replica: int, replicas: int, seed: int) -> Iterator[Any]:
    """An epoch from a function: a replica by itself knows the sizes of a data set's batches."""
    inputs, targets = programs.data()
    return zip(inputs.split(4), targets.split(4), strict=True)


FORMS: dict[str, tuple[str, Callable[[], nn.Module], int]] = {
    "replica": ("replicas=2", programs.batchnorm, 2),
    "stage": ("replicas=1 stages=2 cuts=2 micro_batches=2", programs.dropout, 1),
    "shard": ("replicas=1 shards=2", programs.wide, 2),
    "stages of shards": ("replicas=1 stages=2 shards=2 cuts=2 micro_batches=2", programs.wide, 1),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "model", "_"), FORMS.values(), ids=list(FORMS))
def test_the_run_is_the_plain_one(engine: LocalEngine, strategy: str, model: Callable[[], nn.Module], _: int) -> None:
    trained = program("aot_eager", model, strategy)
    settings: dict[str, Any] = {"engine": engine, "steps": STEPS, "progress": False, "timeout_s": 60.0}
    plain, compiled = (train(trained, f"{strategy}{w}", **settings) for w in ("", " compile=true"))
    for name, tensor in plain.model.state_dict().items():
        # The same operators; AOTAutograd may add the terms of a gradient in another order.
        torch.testing.assert_close(compiled.model.state_dict()[name], tensor, rtol=1e-12, atol=1e-14)
    # What shards sent each other for a comparison is no part of what a step sends.
    sent = [run.summary["payload_bytes_per_step"] for run in (plain, compiled)]
    assert sent[0] == sent[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "model", "samples"), FORMS.values(), ids=list(FORMS))
def test_a_size_where_the_compiler_errs_is_caught(
    engine: LocalEngine, strategy: str, model: Callable[[], nn.Module], samples: int
) -> None:
    wrong = program(partial(wrong_for, samples), model, strategy)
    settings: dict[str, Any] = {"engine": engine, "progress": False, "timeout_s": 60.0}
    known = train(wrong, f"{strategy} compile=true", steps=3, **settings)
    assert known.summary["updates"] == 3
    with pytest.raises(InputError, match=f"with {samples} samples .* differs by up to .* write compile=false"):
        train(wrong, f"{strategy} compile=true", steps=STEPS, **settings)
