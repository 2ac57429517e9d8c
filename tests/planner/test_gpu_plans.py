"""Plans for GPUs name only what runs: each strategy in the output is looked up in the table of support."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import support
from paceline.cli.main import app
from paceline.planner.base import Arrangement
from paceline.planner.search import supported
from paceline.strategy import Strategy
from paceline.support import Case

SHAPE = """
[model]
layers = 8
hidden = 4096
heads = 32
kv_heads = 8
ffn = 14336
vocab = 128256
sequence = 8192
gated = true
tied = false
positions = false

[train]
global_batch = 8
precision = "bf16"
optimizer = "adamw"
"""
VALUE = r'(?:\[[\d,]+\]|[^\s,;"]+)'
NAMED = re.compile(rf"replicas=\d+(?: [a-z_]+={VALUE})* device=cuda(?: [a-z_]+={VALUE})*")


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "llama.toml"
    path.write_text(SHAPE, encoding="utf-8")
    return path


def output(shape: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["plan", str(shape), "--cluster", "2x2 H100-80GB", *options])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_all_that_is_named_runs(shape: Path, objective: str) -> None:
    text = output(shape, "--objective", objective)
    named = set(NAMED.findall(text))
    assert len(named) > 2
    for words in named:
        case = Case.of(Strategy.parse(words), "distributed")
        assert support.first_row(case) is None, words


@pytest.fixture
def without_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no engine support shards or ZeRO on GPUs, without which plans are worse here."""
    built = supported.supports

    def supports(plan: Arrangement, device: str = "cpu", *engine: Any) -> bool:
        return (device == "cpu" or (plan.shards == 1 and not plan.divided)) and built(plan, device, *engine)

    monkeypatch.setattr(supported, "supports", supports)


@pytest.mark.usefixtures("without_shards")
def test_json_names_only_what_runs_and_counts_the_rest(shape: Path) -> None:
    found = json.loads(output(shape, "--json"))
    assert set(found["beyond"]) == {"step_s", "samples_per_s"}
    assert found["beyond"]["samples_per_s"] > found["plans"][0]["samples_per_s"]
    strategies = [each["strategy"] for each in found["plans"]] + [
        point["strategy"] for point in found["curve"]["points"]
    ]
    for words in filter(None, strategies):
        assert Strategy.parse(words).shards == 1
        assert support.first_row(Case.of(Strategy.parse(words), "distributed")) is None


@pytest.mark.usefixtures("without_shards")
def test_unbuilt_plans_have_no_command(shape: Path) -> None:
    found = json.loads(output(shape, "--json", "--unbuilt"))
    divided = [each for each in found["plans"] if each["arrangement"]["divided"] or each["arrangement"]["shards"] > 1]
    assert divided
    assert all(each["command"] is None for each in divided)
    assert "run:   not supported on cuda yet" in output(shape, "--unbuilt")
