"""Two hosts on one: network namespaces of their own, joined by a cable that nobody else can reach."""

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""In namespaces that hold nothing else."""


@dataclass(frozen=True)
class Host:
    """One end of the cable."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str | Path, own_pids: bool = False) -> list[str]:
        """What runs a command there; with process numbers of its own where asked for."""
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if own_pids else []
        return ["ip", "netns", "exec", self.namespace, *apart, *map(str, words)]

    def environment(self) -> dict[str, str]:
        """Of a process there."""
        return os.environ | self.own_environment()

    def own_environment(self) -> dict[str, str]:
        """For Gloo, which has to be told how it is reached."""
        return {"GLOO_SOCKET_IFNAME": self.interface}


def enter(namespace: str) -> None:
    """Have this process, which has just been forked, use the network of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as handle:
        assert libc.setns(handle.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWNET


def why_not() -> str | None:
    """What keeps this machine from having namespaces; None: nothing."""
    if shutil.which("ip") is None:
        return "network namespaces need ip (iproute2)"
    name = f"paceline-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    if made.returncode:
        return f"network namespaces can't be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True, timeout=20)
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Made, and taken away again; skips the test where they can't be had."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    key = uuid.uuid4().hex[:8]
    hosts = tuple(Host(f"paceline-{key}-{i}", f"pl{key}{i}", address) for i, address in enumerate(ADDRESSES))
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        _ip("link", "add", hosts[0].interface, "type", "veth", "peer", "name", hosts[1].interface)
        for host in hosts:
            _ip("link", "set", host.interface, "netns", host.namespace)
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in (host.interface, "lo"):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, timeout=20)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextmanager
def cut_off(hosts: tuple[Host, Host], ways: tuple[bool, bool] = (True, True)) -> Iterator[None]:
    """Have packets vanish on the way from the first host to the second, and back, and no more afterwards.

    Args:
        hosts: both.
        ways: whether those of the first, and those of the second vanish.
    """
    sent = [(host, other) for host, other, way in zip(hosts, hosts[::-1], ways, strict=True) if way]
    for host, other in sent:
        _ip("-n", host.namespace, "route", "add", "blackhole", f"{other.address}/32")
    try:
        yield
    finally:
        for host, other in sent:
            _ip("-n", host.namespace, "route", "delete", "blackhole", f"{other.address}/32")
