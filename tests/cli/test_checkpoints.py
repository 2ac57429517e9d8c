"""``paceline checkpoints``: what is there is listed and verified, and the exit code says whether all is sound."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.writer import CheckpointWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, versions 5 and 10."""
    writer = CheckpointWriter(tmp_path / "ckpt", run="ab12", keep=3, timeout_s=30.0)
    for version in (5, 10):
        writer.begin(version, [TensorChunk.whole("w", torch.ones(1000))], {})
        result = writer.wait(60.0)
        assert result is not None
        assert result.error is None
    writer.close()
    return tmp_path / "ckpt"


def test_sound_checkpoints_are_listed_newest_first(invoke: Any, folder: Path) -> None:
    done = invoke("checkpoints", folder)
    lines = done.stdout.splitlines()
    assert (done.exit_code, lines[0].split()) == (0, ["version", "created", "size", "state"])
    assert [(line.split()[0], line.split()[-1]) for line in lines[1:]] == [("10", "sound"), ("5", "sound")]
    assert invoke("checkpoints", "list", folder).stdout == done.stdout


def test_a_damaged_one_is_named_and_the_exit_code_is_1(invoke: Any, folder: Path) -> None:
    (folder / "step-10" / "part-0.safetensors").write_bytes(b"")
    done = invoke("checkpoints", folder)
    assert done.exit_code == 1
    assert "part-0.safetensors can't be read: it has 0 bytes" in done.stdout.splitlines()[1]
    assert done.stdout.splitlines()[2].endswith("sound")


def test_as_json(invoke: Any, folder: Path) -> None:
    (folder / "step-5" / "manifest.json").unlink()
    done = invoke("checkpoints", folder, "--json")
    newer, older = json.loads(done.stdout)["checkpoints"]
    assert (done.exit_code, newer["version"], newer["error"], older["created"]) == (1, 10, None, None)
    assert newer["folder"] == str(folder / "step-10")
    assert newer["size_bytes"] == sum(file.stat().st_size for file in (folder / "step-10").iterdir())
    assert "manifest.json is missing" in older["error"]


def test_a_folder_without_any(invoke: Any, tmp_path: Path) -> None:
    done = invoke("checkpoints", tmp_path)
    assert (done.exit_code, done.stdout) == (0, f"no checkpoints in {tmp_path}\n")


def test_no_folder_is_refused(invoke: Any, tmp_path: Path) -> None:
    done = invoke("checkpoints", tmp_path / "nowhere")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "nowhere is no folder" in done.stderr
