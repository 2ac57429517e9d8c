"""Ranks as torchrun starts them, forked from a process that has imported already what each would need seconds for.

They find the words that torchrun leaves in the environment, and a file in place of its store. Tests of what torchrun
itself does start it (``distributed_cases.torchrun``).
"""

import contextlib
import faulthandler
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer, ProcessHandle
from paceline.comm.wakeup import Poller
from paceline.engine.spmd import process_group
from tests import namespaces
from tests.namespaces import Host

T = TypeVar("T")

WITHIN_S = 240.0
WELL = "exit code 0"
ALL = "all"


class Play(Protocol):
    """Lets so many ranks run a script to its end, with the folder and the words as its arguments."""

    def __call__(self, script: Path, *words: str, size: int, folder: Path) -> None: ...


def play(fork_server: ForkServer, script: Path, *words: str, size: int, folder: Path) -> None:
    """As :class:`Play` says.

    Raises:
        AssertionError: a rank failed, which ends the others, or was not done in time; with what they printed.
    """
    children = spawned(fork_server, script, *words, size=size, folder=folder)
    try:
        ill = _first_ill(fork_server, children)
        all_said = (f"rank {rank}: {said(folder, rank).read_text() or 'nothing'}" for rank in range(size))
        assert ill is None, "\n".join([ill, "they said:", *all_said])
    finally:
        for child in children:
            fork_server.forget(child)


def spawned(
    fork_server: ForkServer, script: Path, *words: str, size: int, folder: Path, ranks: Sequence[int] | None = None
) -> list[ProcessHandle]:
    """Start the ranks, or some of them; the caller has the fork server forget them."""
    arguments = [str(script), str(folder), *words]
    about = {"size": size, "store": str(folder / f"store {script.stem}"), "arguments": arguments}
    numbers = ranks or range(size)
    for number in numbers:
        said(folder, number).touch()
    return [fork_server.spawn("tests.ranks:rank", about | {"rank": number}) for number in numbers]


def spawned_on(
    fork_server: ForkServer, hosts: Sequence[Host], script: Path, *words: str, port: int, folder: Path
) -> list[ProcessHandle]:
    """Start a rank on each of these hosts, as a script of a scheduler does; the first keeps the store."""
    arguments = [str(script), str(folder), *words]
    common = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port)}
    about = [
        {"rank": rank, "size": len(hosts), "arguments": arguments, "namespace": host.namespace}
        | {"environment": common | host.own_environment() | {"LOCAL_WORLD_SIZE": str(hosts.count(host))}}
        for rank, host in enumerate(hosts)
    ]
    return [fork_server.spawn("tests.ranks:rank", each) for each in about]


def cases_of(request: pytest.FixtureRequest) -> str:
    """The cases that this session looks at by a fixture, for its script: ``name`` of the tests that use it, or all."""
    using = [item for item in request.session.items if isinstance(item, pytest.Function)]
    using = [item for item in using if item.path == request.path and request.fixturename in item.fixturenames]
    names = {item.callspec.params.get("name") if hasattr(item, "callspec") else None for item in using}
    return ALL if None in names else ",".join(sorted(names))


def asked(cases: Mapping[str, T], words: str) -> dict[str, T]:
    """Of a script's cases those that :func:`cases_of` names."""
    return {name: case for name, case in cases.items() if words == ALL or name in words.split(",")}


def statuses(fork_server: ForkServer, children: Sequence[ProcessHandle]) -> list[str]:
    """How each process has ended; whatever is not done in time is killed, and said so."""
    try:
        return [
            fork_server.status(child.pid) if liveness.wait_gone([child.pidfd], WITHIN_S) else "not done in time"
            for child in children
        ]
    finally:
        for child in children:
            liveness.kill(child.pidfd)
            fork_server.forget(child)


def _first_ill(fork_server: ForkServer, children: list[ProcessHandle]) -> str | None:
    """Which one failed, as soon as one has, or who are not done in time; None: all ended well."""
    deadline, waiter = time.monotonic() + WITHIN_S, Poller[ProcessHandle]()
    with contextlib.closing(waiter):
        for child in children:
            waiter.add(child.pidfd, child)
        living = dict(zip(children, range(len(children)), strict=True))
        while living and (left_s := deadline - time.monotonic()) > 0:
            for child in waiter.wait(left_s):
                waiter.remove(child.pidfd)
                number, status = living.pop(child), fork_server.status(child.pid)
                if status != WELL:
                    return f"rank {number}: {status}"
    return f"ranks {list(living.values())} are not done after {WITHIN_S:g} s" if living else None


def rank(args: dict[str, Any], _fds: list[int]) -> None:
    """One of them: what a child of the fork_server does."""
    number, size = str(args["rank"]), str(args["size"])
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ["OMP_NUM_THREADS"] = "1"
    if "namespace" in args:  # of the network: rank 0 keeps a store there
        namespaces.enter(args["namespace"])
        os.environ |= args["environment"]
    else:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
        process_group._job_store = FileStore(args["store"], args["size"])
    torch.set_num_threads(1)
    sys.argv = args["arguments"]
    with said(Path(sys.argv[1]), args["rank"]).open("a") as printed:
        os.dup2(printed.fileno(), sys.stdout.fileno())
        os.dup2(printed.fileno(), sys.stderr.fileno())
        faulthandler.enable()
        faulthandler.dump_traceback_later(0.8 * WITHIN_S)  # who hangs says where
        runpy.run_path(sys.argv[0], run_name="__main__")


def said(folder: Path, number: int) -> Path:
    """Where a rank's words are kept."""
    return folder / f"said.{number}"
