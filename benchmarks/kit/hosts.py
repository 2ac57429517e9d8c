"""Hosts for a measurement: network namespaces that a bridge in another one joins (needs root)."""

import contextlib
import os
import subprocess
import uuid
from collections.abc import Iterator

LATENCY, BURST_BYTES, BURST_S = "50ms", 80_000, 1e-3
"""Of what a link that is too slow holds back; what it may send at once, at least, and in seconds of its rate.

A link that may send less than 64 KiB at once has the kernel cut each segment into packets, which costs a core."""


def address(host: int) -> str:
    """Return the address of a host."""
    return f"10.78.0.{host + 1}"


def why_not() -> str | None:
    """Return why there can be no hosts here; None: there can."""
    return None if os.geteuid() == 0 else "network namespaces need root"


@contextlib.contextmanager
def hosts(count: int, mbit: float | None = None, *, both_ways: bool = False) -> Iterator[list[str]]:
    """Context manager: the names of so many namespaces, each with an interface ``eth0``.

    Args:
        count: of hosts.
        mbit: what each can send in a second, in Mbit; None: as much as it likes.
        both_ways: whether each can receive no more than that, either.
    """
    key = uuid.uuid4().hex[:6]
    bridge, names = f"pl-{key}", [f"pl-{key}-{i}" for i in range(count)]
    try:
        for name in (bridge, *names):
            _ip("netns", "add", name)
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for i, name in enumerate(names):
            _ip("-n", bridge, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", bridge, "link", "set", f"v{i}", "master", "br0", "up")
            _ip("-n", name, "address", "add", f"{address(i)}/24", "dev", "eth0")
            for interface in ("eth0", "lo"):
                _ip("-n", name, "link", "set", interface, "up")
            if mbit is not None:
                burst = max(BURST_BYTES, int(BURST_S * mbit * 1e6 / 8))
                limit = ["root", "tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", LATENCY]
                _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
                if both_ways:
                    _run("tc", "-n", bridge, "qdisc", "add", "dev", f"v{i}", *limit)
        yield names
    finally:
        for name in (bridge, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=20)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)
