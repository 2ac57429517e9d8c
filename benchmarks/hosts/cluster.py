"""A Ray cluster of hosts that are network namespaces, each with links of its own (needs root)."""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kit import hosts

PORT = 6379
ADDRESS = f"{hosts.address(0)}:{PORT}"
"""Of the cluster, for who is on its first host."""

START_S = 120.0
"""How long a node may take to start."""

STORE_BYTES = 600 << 20
"""Of each node's object store."""


@contextlib.contextmanager
def cluster(names: Sequence[str], cores: Sequence[int]) -> Iterator[dict[str, str]]:
    """Context manager: a Ray of these hosts, each with so many cores, as Ray counts them; it ends with the context.

    Yields:
        The environment of who joins it.
    """
    ray = Path(sys.executable).with_name("ray")
    with contextlib.ExitStack() as closing:
        environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="r", dir="/tmp"))
        for i, (name, count) in enumerate(zip(names, cores, strict=True)):
            where = [f"--port={PORT}", "--head", f"--temp-dir={folder}", "--include-dashboard=false"]
            words = [
                *(where if i == 0 else [f"--address={ADDRESS}"]),
                *(f"--node-ip-address={hosts.address(i)}", f"--num-cpus={count}"),
                *(f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", "--block"),
            ]
            log = closing.enter_context((Path(folder) / f"node-{i}.log").open("w"))
            process = subprocess.Popen(
                in_host(name, str(ray), "start", *words), stdout=log, stderr=log, env=environment
            )
            closing.callback(_end, process)
            _wait_until_started(process, Path(log.name))
        yield environment


def in_host(name: str, *words: str) -> list[str]:
    """Return the command that runs another one in a host, in a process group of Linux that ends with it."""
    return ["ip", "netns", "exec", name, *words]


def _wait_until_started(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a node of Ray did not start: {log.read_text()}")
        time.sleep(0.2)  # it says nothing but to its log


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
