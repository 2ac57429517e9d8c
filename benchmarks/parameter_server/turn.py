"""One turn of a baseline: a process of its own, which ends all that it has started before it says what it measured.

So nothing of a baseline is on the machine while the other side is measured::

    measure.py     waits ............................................... the figures
    turn.py        ray_server.trivial(...)   ends what is left of it .... prints
    Ray, workers   start, work, are asked to end ... gone
"""

import contextlib
import ctypes
import importlib
import json
import subprocess
import sys
import time
from typing import Any

import psutil

START_S = 240.0
"""How long a baseline may take to start and to end: 26 processes import torch and Ray on what cores there are."""

PATIENCE_S = 10.0
"""Time limit for a baseline's processes to end once asked, before it is killed; and again until it is gone."""

_PR_SET_CHILD_SUBREAPER = 36


def take(baseline: str, *, seconds: float, **arguments: Any) -> dict[str, float]:
    """The figures of ``module:function(seconds=..., **arguments)``, called in a process of its own.

    Args:
        baseline: the function, in this folder; it measures for ``seconds``, a few times at most.
        seconds: of one measurement.
        arguments: its others, of the types that JSON has.

    Raises:
        RuntimeError: it failed, with what it wrote; or something of it did not end.
        subprocess.TimeoutExpired: it took too long, and was killed.
    """
    command = [sys.executable, __file__, baseline, json.dumps({"seconds": seconds, **arguments})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        root = psutil.Process(process.pid)
        try:
            out, errors = process.communicate(timeout=START_S + 4 * seconds)
        except BaseException:
            try:
                end_descendants(root, patience_s=0)
            finally:
                process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"{baseline} ended with exit code {process.returncode}:\n{errors}")
    figures: dict[str, float] = json.loads(out.splitlines()[-1])
    return figures


def end_descendants(root: psutil.Process, patience_s: float = PATIENCE_S) -> None:
    """Wait for all that descends from ``root`` to end, and kill what does not; RuntimeError where that fails too."""
    psutil.wait_procs(_descendants(root), patience_s)
    until = time.monotonic() + PATIENCE_S
    while living := _descendants(root):
        if time.monotonic() > until:
            raise RuntimeError(f"can't be ended: {living}")
        for process in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(living, 1)


def _descendants(root: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process for process in root.children(recursive=True) if _runs(process)]
    return []


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def main(baseline: str, arguments: str) -> None:
    """The process of a turn."""
    # Processes whose parent has ended become children of this one, so that none is overlooked.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    module, _, function = baseline.partition(":")
    try:
        figures = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    finally:
        end_descendants(psutil.Process())
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
