"""Where all ranks gather each layer, whatever happens to one of them in the middle is told on all, and soon."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.distributed_cases import ended, kept, torchrun
from tests.engine.test_distributed_failures import kept_of

RANKS = 3

NAMED = ("WorkerError", "WaitTimeoutError", "CollectiveError")
"""Ours, and that of the backend ``shm``, which itself sees who has died and who is late."""


@pytest.fixture(scope="module", params=["gloo", "shm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where three ranks have left what they were told, until the last of it killed one."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("distributed_sharded_failure_script.py")
    process = torchrun(script, request.param, ranks=RANKS, folder=folder)
    said = ended(process)
    assert process.returncode == 1, said
    assert (folder / "killed.0").exists(), said
    return folder


def told(folder: Path, name: str) -> Any:
    """What all ranks were told, which is the same."""
    first, *others = kept(folder, name, RANKS)
    assert others == [first] * (RANKS - 1)
    return first


@pytest.mark.parametrize("name", ["fine", "fine again"])
def test_a_run_that_fails_leaves_nothing_to_the_next(folder: Path, name: str) -> None:
    assert told(folder, name) == 6


def test_an_exception_in_forward_reaches_all_with_its_traceback(folder: Path) -> None:
    kind, text = told(folder, "raised")
    assert kind == "WorkerError"
    assert text.startswith("replica 1 failed: ValueError: the tape is torn\n\nTraceback")
    assert "in broken" in text


def test_a_gradient_that_is_not_finite_is_named_though_it_was_summed(folder: Path) -> None:
    kind, text = told(folder, "not finite")
    assert kind == "NonFiniteError"
    assert "the Δ of replica 0 at its step 1 is not finite" in text


def test_a_loop_that_ends_within_an_update(folder: Path) -> None:
    kind, text = told(folder, "too short")
    assert kind == "InputError"
    assert "the loop of replica 1 ended between two of the accumulate=2 batches of one update" in text


def test_a_layer_that_is_read_but_not_called(folder: Path) -> None:
    kind, text = told(folder, "direct")
    assert kind == "InputError"
    assert "reads a parameter of a layer without calling that layer" in text


def test_who_does_not_come_is_named(folder: Path) -> None:
    kind, text = told(folder, "late")
    assert kind in NAMED
    assert re.search(r"waited 1 s for rank 2 .*in (the )?all.gather", text), text


def test_who_was_killed_is_named(folder: Path) -> None:
    (kind, text), other = kept_of(folder, "killed", [0, 2])
    assert other == (kind, text)
    assert kind in NAMED
    assert re.match(r"rank 1 .*ended while rank [02] .*waited .*all.gather", text), text
