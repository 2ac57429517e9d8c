"""A training script ported in eight lines: it trains what it trained, alone and as two ranks, and resumes."""

import difflib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn", reason="needs scikit-learn: its digits are the data")
pytest.importorskip("tqdm", reason="needs tqdm: the script shows its progress with it")

FOLDER = Path(__file__).parents[1] / "examples" / "ported"
PLAIN, JOINED = FOLDER / "plain.py", FOLDER / "joined.py"


def run(script: Path, out: Path, *words: str, ranks: int = 0) -> str:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *torchrun, str(script), "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=os.environ).stderr


def saved(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return torch.load(out / "model.pt"), torch.load(out / "last.pt")


def assert_same(out: Path, expected: Path) -> None:
    """In float64: sums of the same products in another order, of 192 steps."""
    (model, last), (plain_model, plain_last) = saved(out), saved(expected)
    torch.testing.assert_close(model, plain_model, rtol=1e-9, atol=1e-9)
    assert last["scheduler"] == plain_last["scheduler"]
    torch.testing.assert_close(last["optimizer"]["state"], plain_last["optimizer"]["state"], rtol=1e-9, atol=1e-9)


def test_eight_lines_differ() -> None:
    lines = difflib.unified_diff(PLAIN.read_text().splitlines(), JOINED.read_text().splitlines(), n=0, lineterm="")
    new = [line for line in lines if line.startswith("+") and not line.startswith("+++") and line[1:].strip()]
    assert len(new) == 8, new


def test_trains_what_the_plain_script_trains(tmp_path: Path) -> None:
    log = run(PLAIN, tmp_path / "plain")
    alone = run(JOINED, tmp_path / "alone")
    lines = [line.rpartition("\r")[2].strip() for line in log.splitlines() if "test loss" in line]
    assert lines
    assert [line.rpartition("\r")[2].strip() for line in alone.splitlines() if "test loss" in line] == lines
    assert "0/24" in alone  # the progress bar knows its length; an epoch may end before it is drawn again
    assert_same(tmp_path / "alone", tmp_path / "plain")
    run(JOINED, tmp_path / "two", "--batch-size", "32", ranks=2)
    assert_same(tmp_path / "two", tmp_path / "plain")


def test_resumes_as_the_plain_script_does(tmp_path: Path) -> None:
    for script in (PLAIN, JOINED):
        run(script, tmp_path / script.stem, "--epochs", "2")
        run(script, tmp_path / script.stem, "--epochs", "4", "--resume")
    assert_same(tmp_path / "joined", tmp_path / "plain")
