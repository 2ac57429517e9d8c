"""Δ sent in buckets during the backward pass is the Δ that is sent after it."""

import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.distributed import overlap
from tests import oracle
from tests.engine.distributed_cases import (
    ACCUMULATED,
    GRAPHS,
    ONE_PROCESS,
    OVERLAPPED,
    STEPS,
    UNDIVIDED,
    ended,
    told,
    torchrun,
)
from tests.engine.distributed_cases import kept as kept_by_all
from tests.engine.test_distributed_parity import BOUNDS, COUNTS, ROUNDING, assert_equal, assert_same

RANKS = 2
"""Two numbers have one sum. More are added in an order that depends on where in a vector they lie."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """How many ranks were started, and where they left what they found, until the last of it killed one."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    process = torchrun(Path(__file__).with_name("distributed_overlap_script.py"), ranks=RANKS, folder=folder)
    said = ended(process)
    assert process.returncode == 1, said
    assert (folder / "killed.0").exists(), said
    return RANKS, folder


def found(started: tuple[int, Path], name: str) -> Any:
    """What rank 0 has, once it is seen that all ranks have the same."""
    ranks, folder = started
    first, *others = kept_by_all(folder, name, ranks)
    for other in others:
        if isinstance(first, dict):
            assert_equal(other, first)
        else:
            assert other == first
    return first


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "") for name in OVERLAPPED),
        *((name, ", apart") for name in [*OVERLAPPED][::2]),
        *((name, ", graph") for name in GRAPHS),
    ],
)
def test_it_changes_nothing(started: tuple[int, Path], name: str, how: str) -> None:
    """Nor does it where large gradients are summed from where autograd has left them, or where steps are graphs."""
    overlapped, whole = found(started, f"{name}{how}"), found(started, f"{name}, whole")
    assert overlapped["summary"]["notes"]["buckets"] > 1
    assert whole["summary"]["notes"]["buckets"] == 0
    assert_same(overlapped["state"], whole["state"], 0.0)
    for count in (*COUNTS, "payload_bytes_per_step"):
        assert overlapped["summary"][count] == whole["summary"][count], count


@pytest.mark.parametrize("name", [n for n in OVERLAPPED if n in ONE_PROCESS or n in ACCUMULATED])
def test_it_is_one_process(started: tuple[int, Path], name: str) -> None:
    expected = oracle.one_process(OVERLAPPED[name].program, started[0], STEPS, 3 if name in ACCUMULATED else 1)
    assert_same(found(started, name)["state"], expected, BOUNDS.get(name, ROUNDING))


@pytest.mark.parametrize("name", [n for n in OVERLAPPED if n not in ONE_PROCESS and n not in ("until", "slow")])
def test_it_is_what_virtual_time_says(started: tuple[int, Path], name: str) -> None:
    run, virtual = found(started, name), told(OVERLAPPED[name].run(started[0], "virtual"))
    assert_same(run["state"], virtual["state"], BOUNDS.get(name, ROUNDING))
    for count in COUNTS:
        assert run["summary"][count] == virtual["summary"][count], count


@pytest.mark.parametrize("name", [*OVERLAPPED][::3])
def test_alone_there_is_nobody_to_send_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = told(OVERLAPPED[name].run(1, "distributed"))
    monkeypatch.setattr(overlap, "BUCKET_BYTES", 64)
    assert_same(told(OVERLAPPED[name].run(1, "distributed"))["state"], whole["state"], 0.0)


@pytest.mark.parametrize("name", [*UNDIVIDED, "shm"])
def test_where_it_is_off(started: tuple[int, Path], name: str) -> None:
    assert found(started, name)["summary"]["notes"]["buckets"] == 0


def test_a_model_of_the_users_keeps_no_hook(started: tuple[int, Path]) -> None:
    assert found(started, "hooks") == [0] * 4


def test_spans_do_not_lie_over_each_other(started: tuple[int, Path]) -> None:
    run = found(started, "traced")
    for replica in range(started[0]):
        spans = sorted((s for s in run["spans"] if s.replica == replica), key=lambda s: s.start_ns)
        assert {"backward", "wait", "all_reduce", "apply"} <= {s.action for s in spans}
        assert all(one.end_ns <= other.start_ns for one, other in pairwise(spans))


def test_a_backward_pass_that_fails_on_its_way(started: tuple[int, Path]) -> None:
    kind, text = found(started, "raised")
    assert kind == "WorkerError"
    assert text.startswith("replica 1 failed: ValueError: the tape is torn")


@pytest.mark.parametrize(("name", "how"), [("made anew", "begun anew"), ("left", "left")])
def test_a_delta_of_which_a_part_is_sent_can_not_be_taken_back(started: tuple[int, Path], name: str, how: str) -> None:
    kind, text = found(started, name)
    assert kind == "PacelineError"
    assert f"handed over in part was {how}; let what worker.step() raises end the loop" in text


def test_a_gradient_that_is_not_finite_is_named(started: tuple[int, Path]) -> None:
    kind, text = found(started, "not finite")
    assert kind == "NonFiniteError"
    assert re.search(r"the Δ of replica 1 at its step \d is not finite", text)


def test_who_is_killed_in_its_backward_pass_is_named(started: tuple[int, Path]) -> None:
    ranks, folder = started
    told_to = [pickle.loads((folder / f"killed.{rank}").read_bytes()) for rank in range(ranks) if rank != 1]
    # Rank 1 ends in its step 3 with the sum of step 2 in its hands; another may still wait for what it sent of that.
    pattern = (
        r"rank 1 \(process \d+ on \S+\) ended while rank \d .* the all-reduce of its step [23]: killed by SIGKILL$"
    )
    for kind, text in told_to:
        assert (kind, text) == told_to[0]
        assert kind == "WorkerError"
        assert re.match(pattern, text)
