"""Copies of snapshots that begin as late as they may."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from paceline.checkpoint import writer


def copy_late(patch: pytest.MonkeyPatch, executor: type[Any]) -> None:
    """Have a copy begin once an update waits for it, or, were none to wait, after the next update.

    Args:
        patch: undoes it.
        executor: class whose ``apply`` makes updates, in this process.
    """
    updates, waiting = list[None](), list[None]()
    apply, copy, wait = executor.apply, writer._Staging.copy, writer.CheckpointWriter.wait_copied

    def applied(own: Any, action: Any) -> None:
        apply(own, action)
        updates.append(None)

    def waits(own: writer.CheckpointWriter) -> None:
        waiting.append(None)
        wait(own)

    def copies(staging: Any, tensors: Sequence[Tensor]) -> None:
        before, deadline = len(updates), time.monotonic() + 60.0
        while not waiting and len(updates) == before and time.monotonic() < deadline:
            time.sleep(0.0005)
        copy(staging, tensors)
        waiting.clear()

    patch.setattr(executor, "apply", applied)
    patch.setattr(writer.CheckpointWriter, "wait_copied", waits)
    patch.setattr(writer._Staging, "copy", copies)
