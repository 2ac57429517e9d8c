"""Copies of snapshots that begin as late as they may."""

import threading
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
    updates, waiting, changed = 0, False, threading.Condition()
    apply, copy, wait = executor.apply, writer._Staging.copy, writer.CheckpointWriter.wait_copied

    def applied(own: Any, action: Any) -> None:
        nonlocal updates
        apply(own, action)
        with changed:
            updates += 1
            changed.notify_all()

    def waits(own: writer.CheckpointWriter) -> None:
        nonlocal waiting
        with changed:
            waiting = True
            changed.notify_all()
        wait(own)

    def copies(staging: Any, tensors: Sequence[Tensor]) -> None:
        nonlocal waiting
        with changed:
            before = updates
            changed.wait_for(lambda: waiting or updates > before, 60.0)
        copy(staging, tensors)
        waiting = False

    patch.setattr(executor, "apply", applied)
    patch.setattr(writer.CheckpointWriter, "wait_copied", waits)
    patch.setattr(writer._Staging, "copy", copies)
