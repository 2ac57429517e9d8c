"""Checkpoints on the local engine hold one version of A and of its optimizer, whenever they are copied."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Run
from paceline.checkpoint.reader import Checkpoint
from paceline.engine.local.server import SharedMemoryServer
from tests import oracle
from tests.engine import programs
from tests.engine.late_copies import copy_late

Local = Callable[..., Run]

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
# Its state is none of the vectors that a kernel has.
NADAM = functools.partial(torch.optim.NAdam, lr=0.01)


@pytest.mark.parametrize("optimizer", [ADAM, NADAM])
@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=1 aggregation=asynchronous"])
def test_updates_wait_for_a_copy_under_way(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, optimizer: Any
) -> None:
    """However late copies begin, they are of one version."""
    program = programs.program(optimizer=optimizer)
    local(program, strategy, steps=4, checkpoint=tmp_path / "whole")
    copy_late(monkeypatch, SharedMemoryServer)
    local(program, strategy, steps=9, checkpoint=tmp_path / "cut", checkpoint_every="4 steps", keep=9)
    expected, found = (Checkpoint.open(tmp_path / name / "step-4") for name in ("whole", "cut"))
    assert set(found.names()) == set(expected.names())
    assert all(torch.equal(found.read(name), expected.read(name)) for name in expected.names())


@pytest.mark.parametrize("form", ["shards=2", "stages=2"])
def test_replicas_of_several_workers_go_on_under_any_policy(local: Local, tmp_path: Path, form: str) -> None:
    """Each worker knows the version that it is sent as the one that the run goes on from."""
    program, strategy = programs.program(optimizer=ADAM), f"replicas=1 {form} aggregation=asynchronous"
    whole = local(program, strategy, steps=9)
    local(program, strategy, steps=4, checkpoint=tmp_path)
    run = local(program, strategy, steps=9, checkpoint=tmp_path, resume=True)
    oracle.assert_same(whole.model, run.state, 0)
    assert run.summary["updates"] == run.summary["steps"] == 9
