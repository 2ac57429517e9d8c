"""Whatever happens to one rank, all ranks are told the same, and soon."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.distributed_cases import ended, kept, torchrun

RANKS = 3


@pytest.fixture(scope="module", params=["gloo", "shm", "hierarchical"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where three ranks have left what they were told, until the last of it killed one."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("distributed_failure_script.py")
    process = torchrun(script, request.param, ranks=RANKS, folder=folder)
    said = ended(process)
    assert process.returncode == 1, said
    assert (folder / "killed.0").exists(), said
    return folder


def told(folder: Path, name: str) -> Any:
    """What all ranks were told, which is the same."""
    first, *others = (found["told"] for found in kept(folder, name, RANKS))
    for other in others:
        assert other == first
    return first


@pytest.mark.parametrize("name", ["fine", "fine again"])
def test_a_group_of_the_users_own_stays_and_serves_the_next_run(folder: Path, name: str) -> None:
    assert told(folder, name)["updates"] == 6


def test_an_exception_reaches_all_with_its_traceback(folder: Path) -> None:
    kind, text = told(folder, "raised")
    assert kind == "WorkerError"
    assert text.startswith("replica 1 failed: ValueError: the tape is torn\n\nTraceback")
    assert "in broken" in text


def test_a_score_that_fails(folder: Path) -> None:
    kind, text = told(folder, "in metrics")
    assert kind == "WorkerError"
    assert "the test set can't be scored: ValueError: the tape is torn" in text


def test_ranks_that_start_from_different_words(folder: Path) -> None:
    kind, text = told(folder, "unequal")
    assert kind == "PacelineError"
    assert "seed is 0 in rank 0, but 1 in rank 1; " in text
    assert "all ranks must run one script" in text


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("rate", "lr of the optimizer is 0.1 in rank 0, but 0.2 in rank 1"),
        ("optimizer", "optimizer is SGD in rank 0, but Adam in rank 1"),
        ("batch", "batch size is 4 per replica in rank 0, but 8 per replica in rank 1"),
        ("clip", "clip_norm is None in rank 0, but 1.0 in rank 1"),
        ("length", "training set is 50 samples (digest "),
        ("samples", "training set is 50 samples (digest "),
        ("loss", "code of the loss (Python 3."),
        ("activation", "layers is 1 Linear, 1 ReLU in rank 0, but 1 Linear, 1 Tanh in rank 1"),
        ("attribute", "code of the model (Python 3."),
        ("shape", "weight is float64 [3, 6] in rank 0, but float64 [4, 6] in rank 1"),
        ("scheduler", "scheduler is StepLR (digest "),
    ],
)
def test_ranks_that_are_about_to_do_different_jobs(folder: Path, name: str, named: str) -> None:
    kind, text = told(folder, f"wrong {name}")
    assert kind == "PacelineError"
    assert named in text


def test_a_gradient_that_is_not_finite_is_named(folder: Path) -> None:
    kind, text = told(folder, "not finite")
    assert kind == "NonFiniteError"
    assert "the Δ of replica 0 at its step 1 is not finite" in text


@pytest.mark.parametrize("name", ["terminated", "interrupted"])
def test_a_signal_to_one_ends_all_at_one_step(folder: Path, name: str) -> None:
    summary = told(folder, name)
    assert summary["interrupted"]
    assert summary["updates"] == 4  # the signal came before the fourth
    assert summary["gradients"] == 4 * RANKS


def test_who_does_not_come_is_named(folder: Path) -> None:
    kind, text = told(folder, "late")
    assert kind == "WaitTimeoutError"
    assert re.search(
        r"rank 0, rank 1 waited 1 s for rank 2 \(process \d+ on \S+\) in .* all-reduce of its step 3", text
    )


def test_who_was_killed_is_named(folder: Path) -> None:
    (kind, text), other = (found["told"] for found in kept_of(folder, "killed", [0, 2]))
    assert other == (kind, text)
    assert kind == "WorkerError"
    named = r"rank 1 \(process \d+ on \S+\) ended while rank [02] .* waited for "
    assert re.match(named + "the all-reduce of its step 3: killed by SIGKILL", text)


def kept_of(folder: Path, name: str, ranks: list[int]) -> list[Any]:
    """What these ranks have left."""
    return [pickle.loads((folder / f"{name}.{rank}").read_bytes()) for rank in ranks]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_who_was_killed_is_named_before_torchrun_ends_the_others(tmp_path: Path, backend: str) -> None:
    script = Path(__file__).with_name("distributed_killed_script.py")
    process = torchrun(script, backend, "5", ranks=RANKS, folder=tmp_path)
    said = ended(process)
    assert process.returncode == 1, said
    assert re.search(r"^paceline: rank 1 \(process \d+ on \S+\) ended .* step \d+: killed by SIGKILL$", said, re.M), (
        said
    )
    assert "CollectiveError" not in said
