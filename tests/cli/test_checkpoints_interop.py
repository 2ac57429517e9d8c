"""``paceline checkpoints export`` and ``import``: what is written, what is printed, what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoint.interop import read_state

WEIGHTS = {"w": torch.arange(4.0), "b": torch.tensor(1, dtype=torch.int64)}


@pytest.fixture
def checkpoints(invoke: Any, tmp_path: Path) -> Path:
    """A folder that was imported from a file."""
    save_file(WEIGHTS, tmp_path / "weights.safetensors")
    done = invoke("checkpoints", "import", tmp_path / "weights.safetensors", "--out", tmp_path / "ckpt")
    line = f"{tmp_path}/weights.safetensors -> {tmp_path}/ckpt/step-0: 2 tensors, 24 B\n"
    assert (done.exit_code, done.stdout, done.stderr) == (0, line, "")
    return tmp_path / "ckpt"


def test_it_is_listed_as_sound(invoke: Any, checkpoints: Path) -> None:
    done = invoke("checkpoints", checkpoints)
    assert (done.exit_code, done.stdout.splitlines()[1].split()[::3]) == (0, ["0", "B"])
    assert done.stdout.endswith("sound\n")
    assert all(torch.equal(value, WEIGHTS[name]) for name, value in read_state(checkpoints).items())


@pytest.mark.parametrize("folder", ["ckpt", "ckpt/step-0"])
def test_export_for_hugging_face(invoke: Any, checkpoints: Path, tmp_path: Path, folder: str) -> None:
    done = invoke("checkpoints", "export", tmp_path / folder, "--safetensors", tmp_path / "hf", "--json", "--progress")
    source, target = str(checkpoints / "step-0"), str(tmp_path / "hf")
    expected = {"source": source, "target": target, "tensors": 2, "size_bytes": 24, "notes": []}
    assert (done.exit_code, json.loads(done.stdout)) == (0, expected)
    assert all(torch.equal(v, WEIGHTS[n]) for n, v in load_file(tmp_path / "hf" / "model.safetensors").items())


def test_torchs_format_there_and_back(invoke: Any, checkpoints: Path, tmp_path: Path) -> None:
    assert invoke("checkpoints", "export", checkpoints, "--dcp", tmp_path / "dcp").exit_code == 0
    refused = invoke("checkpoints", "import", tmp_path / "dcp", "--out", tmp_path / "new")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "reading it can run any code; if you trust whoever wrote it, write trust=True, or --trust" in refused.stderr
    assert invoke("checkpoints", "import", tmp_path / "dcp", "--out", tmp_path / "new", "--trust").exit_code == 0
    assert all(torch.equal(value, WEIGHTS[name]) for name, value in read_state(tmp_path / "new").items())


def test_what_cannot_be_done_is_refused(invoke: Any, checkpoints: Path, tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))
    for words, message in (
        (("export", checkpoints), "write either --safetensors OUT or --dcp OUT"),
        (("export", checkpoints, "--dcp", "a", "--safetensors", "b"), "write either --safetensors OUT or --dcp OUT"),
        (("export", checkpoints, "--dcp", checkpoints), "exists, and nothing is overwritten"),
        (("export", tmp_path, "--dcp", tmp_path / "new"), "has no checkpoint"),
        (("import", tmp_path / "nowhere", "--out", tmp_path / "new"), "nowhere is missing"),
        (("import", tmp_path, "--out", tmp_path / "new"), "write the path of one file: weights.safetensors"),
    ):
        done = invoke("checkpoints", *words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_a_damaged_one_that_is_passed_over_is_said(invoke: Any, checkpoints: Path, tmp_path: Path) -> None:
    (checkpoints / "step-9").mkdir()
    done = invoke("checkpoints", "export", checkpoints, "--safetensors", tmp_path / "hf")
    assert done.exit_code == 0
    assert "step-9/manifest.json is missing" in done.stderr
