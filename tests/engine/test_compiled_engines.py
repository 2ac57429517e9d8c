"""Inductor's code in real workers: the result is the plain run's, and what was compiled is there for the next run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import train
from paceline.engine.local.engine import LocalEngine
from tests.engine import programs


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """An engine of this file alone, whose workers keep what they compile in a folder of its own."""
    with pytest.MonkeyPatch.context() as environment, LocalEngine() as local:
        environment.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield local


MODULE = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64))
"""A loss that is a module, with a tensor of its own."""

RUNS = {
    "replicas=2 accumulate=2": {"model": programs.dropout, "loss": MODULE},
    "replicas=1 stages=2 cuts=2 micro_batches=2": {"model": programs.dropout, "loss": MODULE},
    "replicas=1 shards=2": {"model": programs.wide, "loss": MODULE},
}


@pytest.mark.parametrize(("strategy", "fields"), RUNS.items(), ids=list(RUNS))
def test_compiled_workers_train_what_plain_ones_do(engine: LocalEngine, strategy: str, fields: dict[str, Any]) -> None:
    program = programs.program(**fields)
    settings: dict[str, Any] = {"engine": engine, "steps": 14, "progress": False, "timeout_s": 300.0}
    plain, compiled = (train(program, f"{strategy}{words}", **settings) for words in ("", " compile=true"))
    expected, found = plain.model.state_dict(), compiled.model.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        # Fused sums run in another order: some units of the last place of float64 in each of 14 steps.
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


SCRIPT = """
import torch
from paceline import train
from tests.engine import programs

train(programs.program(), "replicas=1 compile=true", engine="virtual", steps=2, progress=False)
from torch._dynamo.utils import counters
graphs, kernels = counters["aot_autograd"], counters["inductor"]
print(graphs["autograd_cache_hit"] + kernels["fxgraph_cache_hit"], kernels["fxgraph_cache_miss"])
"""


def test_a_second_process_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def hits_and_misses() -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        return [int(word) for word in done.stdout.split()]

    first, second = hits_and_misses(), hits_and_misses()
    assert first[1] > 0
    assert second[0] > 0
    assert second[1] == 0
