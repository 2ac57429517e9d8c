"""Runs functions in processes that have a simulated accelerator.

torch takes one such device into a process, for good, and ``torch.accelerator.is_available()`` and more is otherwise
from then on. So the process of pytest has none, and what needs one runs in a fork of the tests' fork server::

    def copied_bytes(samples: int) -> int:         # in a module tests/engine/some_cases.py, which pytest may import
        ...                                        # on torch.device("sim"); torch.sim.copies counts
        return torch.sim.copies.to_host_bytes

    def test_copies_nothing(fork_server: ForkServer) -> None:
        assert running.run(fork_server, "tests.engine.some_cases:copied_bytes", samples=8) == 0

Processes that such a function starts have the device if they are forks of one that has it, as those of a fork server
that preloads ``tests.accelerator.python_device``, or once they import that.
"""

import contextlib
import importlib
import json
import os
import selectors
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.comm.fork_server import ForkServer, ProcessHandle

PYTHON = "tests.accelerator.python_device"
CPP = "tests.accelerator.cpp_device"

WITHIN_S = 240.0
"""Half a minute of which one may take that builds a device."""


def run(
    fork_server: ForkServer, target: str, *, device: str = PYTHON, within_s: float = WITHIN_S, **arguments: Any
) -> Any:
    """Call a function in a process of its own that has imported the device; return what it returned.

    Args:
        fork_server: forks it.
        target: "package.module:function".
        device: module that installs the device.
        within_s: when the process has to have ended.
        arguments: for the function, and like its result what JSON can carry.

    Raises:
        AssertionError: it raised, with its traceback; or its process has died, or not ended in time.
    """
    return run_all(fork_server, target, [arguments], device=device, within_s=within_s)[0]


def run_all(
    fork_server: ForkServer,
    target: str,
    calls: Sequence[Mapping[str, Any]],
    *,
    device: str = PYTHON,
    within_s: float = WITHIN_S,
) -> list[Any]:
    """As :func:`run`, in as many processes at once as there are calls; the first that fails ends all."""
    with contextlib.ExitStack() as stack:
        outs, children = [stack.enter_context(tempfile.TemporaryFile()) for _ in calls], []
        for arguments, out in zip(calls, outs, strict=True):
            about = {"target": target, "device": device, "arguments": dict(arguments)}
            children.append(fork_server.spawn("tests.accelerator.running:child", about, [out.fileno()]))
            stack.callback(fork_server.forget, children[-1])
        results: list[Any] = [None] * len(calls)
        for number in _ended(children, target, within_s):
            outs[number].seek(0)
            told = outs[number].read()
            assert told, f"{target}: process {number}: {fork_server.status(children[number].pid)}"
            outcome = json.loads(told)
            assert "raised" not in outcome, f"{target}: process {number} raised\n{outcome['raised']}"
            results[number] = outcome["returned"]
        return results


def _ended(children: Sequence[ProcessHandle], target: str, within_s: float) -> Iterator[int]:
    """Yield the number of each process as it ends; AssertionError: one has not in time."""
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as living:
        for number, handle in enumerate(children):
            living.register(handle.pidfd, selectors.EVENT_READ, number)
        while living.get_map():
            ended = living.select(deadline - time.monotonic())
            assert ended, f"{target}: not ended after {within_s:g} s"
            for key, _ in ended:
                living.unregister(key.fd)
                yield key.data


def child(about: dict[str, Any], fds: list[int]) -> None:
    """Do the part of a process: install the device, call the function, write what became of it."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    module, _, name = about["target"].partition(":")
    try:
        importlib.import_module(about["device"])
        outcome = {"returned": getattr(importlib.import_module(module), name)(**about["arguments"])}
    except BaseException:
        outcome = {"raised": traceback.format_exc()}
    with os.fdopen(fds[0], "w") as out:
        out.write(json.dumps(outcome))


def outcomes(module: str) -> dict[str, str | None]:
    """Call each function of a module's ``CASES``; return its traceback, or None, by its name."""
    return {case.__name__: _outcome(case) for case in importlib.import_module(module).CASES}


def _outcome(case: Any) -> str | None:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return None
