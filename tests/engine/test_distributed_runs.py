"""What ranks measure and tell of a run."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from tests.engine.distributed_cases import ended, kept, torchrun

RANKS = 2


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where two ranks have left what they found, and what they printed."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    process = torchrun(Path(__file__).with_name("distributed_runs_script.py"), ranks=RANKS, folder=folder)
    said = ended(process)
    assert process.returncode == 0, said
    return folder, said


@pytest.fixture
def folder(started: tuple[Path, str]) -> Path:
    return started[0]


def of_first(folder: Path, name: str) -> Any:
    return kept(folder, name, RANKS)[0]


def test_the_payload_is_what_the_connections_carry(folder: Path) -> None:
    summary = of_first(folder, "counted")["summary"]
    carried = sum(kept(folder, "sockets", RANKS))
    # Gloo's own headers, and some words with the job's store: under a hundredth of 1.6 MB a step.
    assert carried == pytest.approx(summary["payload_bytes_per_step"], rel=0.01)
    formula = 2 * (RANKS - 1) * summary["parameter_bytes"][0]
    assert summary["notes"]["payload_ring_formula_bytes_per_step"] == formula
    assert summary["payload_bytes_per_step"] == pytest.approx(formula, rel=0.001)  # the ranks' rows beside it


def test_spans_show_whom_the_others_wait_for(folder: Path) -> None:
    run = of_first(folder, "traced")
    actions = {span.action for span in run["spans"]}
    assert {"forward", "backward", "delay", "wait", "all_reduce", "apply"} <= actions
    (slow,) = {span.replica for span in run["spans"] if span.action == "delay"}
    waited = {r: sum(s.duration_ns for s in run["spans"] if (s.replica, s.action) == (r, "wait")) for r in range(RANKS)}
    assert waited[1 - slow] > waited[slow]
    for replica in range(RANKS):
        spans = sorted((s for s in run["spans"] if s.replica == replica), key=lambda s: s.start_ns)
        assert all(one.end_ns <= other.start_ns for one, other in pairwise(spans))


def test_a_delay_that_was_asked_for_is_no_hang(folder: Path) -> None:
    assert of_first(folder, "excused")["summary"]["updates"] == 1


def test_a_budget_of_seconds_ends_all_at_one_step(folder: Path) -> None:
    first, other = kept(folder, "timed", RANKS)
    assert first["history"] == other["history"]
    assert first["summary"]["seconds"] == 0.5
    assert first["summary"]["updates"] > 0
    assert first["summary"]["gradients"] == first["summary"]["applied"] + first["summary"]["discarded"]
    torch.testing.assert_close(first["state"], other["state"], rtol=0, atol=0)


def test_rank_0_alone_saves(folder: Path) -> None:
    run = paceline.load(folder / "saved")
    assert (run.engine, run.summary["updates"]) == ("distributed", 2)
    assert not (folder / "saved" / "workers.json").exists()


def test_rank_0_alone_prints(started: tuple[Path, str]) -> None:
    printed = [line for line in started[1].splitlines() if line.startswith("{")]
    compared, trained = map(json.loads, printed)
    assert len(compared["strategies"]) == 2
    assert trained["engine"] == "distributed"
    assert (started[0] / "compared" / "report.html").exists()


@pytest.mark.parametrize("backend", ["shm", "hierarchical"])
def test_shared_memory_carries_the_same(folder: Path, backend: str) -> None:
    ours, gloo = of_first(folder, backend), of_first(folder, "gloo")
    assert (ours["summary"]["notes"]["backend"], gloo["summary"]["notes"]["backend"]) == (backend, "gloo")
    torch.testing.assert_close(ours["state"], gloo["state"], rtol=0, atol=0)  # two numbers have one sum
