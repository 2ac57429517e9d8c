"""Checkpoints on the local engine hold one version of A and of its optimizer, whenever they are copied."""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import Run
from paceline.checkpoint import writer
from paceline.checkpoint.reader import Checkpoint
from paceline.engine.local.server import SharedMemoryServer
from tests.engine import programs

Local = Callable[..., Run]

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
# Its state is none of the vectors that a kernel has.
NADAM = functools.partial(torch.optim.NAdam, lr=0.01)


@pytest.mark.parametrize("optimizer", [ADAM, NADAM])
@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=1 aggregation=asynchronous"])
def test_updates_wait_for_a_copy_under_way(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, optimizer: Any
) -> None:
    """A copy begins late: once an update waits for it, or, were none to wait, after the next update."""
    program, versions, waiting = programs.program(optimizer=optimizer), list[int](), list[bool]()
    apply, copy, wait = SharedMemoryServer.apply, writer._Staging.copy, writer.CheckpointWriter.wait_copied

    def applied(server: SharedMemoryServer, action: Any) -> None:
        apply(server, action)
        versions.append(server.version)

    def waits(own: writer.CheckpointWriter) -> None:
        waiting.append(True)
        wait(own)

    def copies_late(staging: Any, tensors: Sequence[Tensor]) -> None:
        updates, deadline = len(versions), time.monotonic() + 60.0
        while not waiting and len(versions) == updates and time.monotonic() < deadline:
            time.sleep(0.0005)
        copy(staging, tensors)
        waiting.clear()

    local(program, strategy, steps=4, checkpoint=tmp_path / "whole")
    monkeypatch.setattr(SharedMemoryServer, "apply", applied)
    monkeypatch.setattr(writer.CheckpointWriter, "wait_copied", waits)
    monkeypatch.setattr(writer._Staging, "copy", copies_late)
    local(program, strategy, steps=9, checkpoint=tmp_path / "cut", checkpoint_every="4 steps", keep=9)
    expected, found = (Checkpoint.open(tmp_path / name / "step-4") for name in ("whole", "cut"))
    assert set(found.names()) == set(expected.names())
    assert all(torch.equal(found.read(name), expected.read(name)) for name in expected.names())
