"""Linux system calls, and how much memory this process may still use.

How much memory this process may still fill: on the machine, and under the limits of the groups that it is in.
"""

import contextlib
import ctypes
import os
import platform
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from paceline.core.errors import PacelineError

MFD_CLOEXEC = 1
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # the same number on every architecture
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_THRESHOLD, _NEVER = 2**25, 2**31 - 1  # glibc takes no larger mmap threshold, and an int
_SCHED_SETATTR, _SCHED_GETATTR, _RESET_ON_FORK = 314, 315, 1
_SCHED_ATTR = struct.Struct("=IIQiIQQQII")
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}


def memfd_create(name: str) -> int:
    """A new anonymous file in memory, closed on exec; returns its fd."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, MFD_CLOEXEC)
    return _call("memfd_create", _MEMFD_CREATE.get(platform.machine()), ctypes.c_char_p(name.encode()), MFD_CLOEXEC)


def pidfd_open(pid: int) -> int:
    """A file descriptor that stands for process ``pid``, closed on exec."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call("pidfd_open", _PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Send signal ``number`` to the process behind ``pidfd``."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _call("pidfd_send_signal", _PIDFD_SEND_SIGNAL, pidfd, number, None, 0)


def keep_freed_memory() -> None:
    """Let this process keep what it frees, for what it allocates next.

    A training step frees and allocates the same blocks again and again. By its defaults glibc gives large ones back to
    the system at once, and the next step pays a page fault for every 4 KiB of them. Other C libraries are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_back_freed_memory() -> None:
    """Let the system have what this process has freed so far: what was there for a start alone comes no more."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def prompt(slice_ns: int = 100_000) -> Iterator[None]:
    """Let this thread, when it wakes, run before those that compute; for as long as the context lasts.

    It asks the scheduler for short slices, which Linux gives from 6.12 on to whoever wants them, and for which it then
    interrupts longer ones. It gets no more processor time than before. Where it can't be had, nothing changes.
    """
    before = _scheduling()
    if before is None:
        yield
        return
    _schedule(before._replace(flags=before.flags | _RESET_ON_FORK, runtime_ns=slice_ns))  # children get no short ones
    try:
        yield
    finally:
        _schedule(before)
        if _scheduling() != before:  # who is not privileged may not take the flag back
            _schedule(before._replace(flags=before.flags | _RESET_ON_FORK))


@contextlib.contextmanager
def considerate() -> Iterator[None]:
    """Let this thread, when it wakes, wait until one of those that compute stops; for as long as the context lasts.

    Where more of them compute than there are cores, interrupting one costs it what it has in the caches, while a Δ that
    is left lying for a moment costs nothing: somebody else computes meanwhile. Where it can't be had, nothing changes.
    """
    if not sys.platform.startswith("linux") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class _Scheduling(NamedTuple):
    """``struct sched_attr``, as far as it is asked for here."""

    size: int
    policy: int
    flags: int
    nice: int
    priority: int
    runtime_ns: int
    """Of a slice."""
    deadline_ns: int
    period_ns: int
    clamp_min: int
    clamp_max: int


def _scheduling() -> _Scheduling | None:
    """This thread's; None where it has no slices that can be asked for."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None
    attributes = ctypes.create_string_buffer(_SCHED_ATTR.size)
    ctypes.CDLL(None).syscall(_SCHED_GETATTR, 0, attributes, _SCHED_ATTR.size, 0)
    found = _Scheduling._make(_SCHED_ATTR.unpack(attributes.raw))
    return found if found.policy == os.SCHED_OTHER and found.runtime_ns else None


def _schedule(wanted: _Scheduling) -> None:
    ctypes.CDLL(None).syscall(_SCHED_SETATTR, 0, _SCHED_ATTR.pack(*wanted), 0)


def _call(name: str, number: int | None, *arguments: object) -> int:
    if not sys.platform.startswith("linux") or number is None:
        raise PacelineError(
            f"{name} is missing on {platform.system()} {platform.machine()}; processes of one host share memory "
            "by it, on Linux only; write engine='virtual' or engine='distributed'"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result


ROOT = Path("/sys/fs/cgroup")

SECOND: Mapping[str, str] = {"limit": "memory.max", "used": "memory.current", "evictable": "inactive_file"}
"""What the files of cgroup v2 are called, and the line of memory.stat: pages of files that can be taken back."""

FIRST: Mapping[str, str] = {
    "limit": "memory.limit_in_bytes",
    "used": "memory.usage_in_bytes",
    "evictable": "total_inactive_file",
}
"""The same of cgroup v1."""


def available_bytes() -> int:
    """How much memory may still be filled here: what is free, swap included, under the limit of a container."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    groups = Path("/proc/self/cgroup")
    said = groups.read_text() if groups.exists() else ""
    return int(min([free, *(left(folder, names) for folder, names in limited(said, ROOT))]))


def limited(said: str, root: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """The folders of the groups that may bound a process's memory, and what their files are called.

    In a container its own group is mounted as the root, on a host it is the path in /proc/self/cgroup.

    Args:
        said: what is in /proc/self/cgroup: ``hierarchy:controllers:path``, a line each.
        root: where groups are mounted.
    """
    for line in said.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from (((root / part), SECOND) for part in ("", path.lstrip("/")))
        elif "memory" in controllers.split(","):
            yield from (((root / "memory" / part), FIRST) for part in ("", path.lstrip("/")))


def left(folder: Path, names: Mapping[str, str]) -> float:
    """What a group may still fill, in bytes; without a limit, any amount."""
    limit = _number(folder / names["limit"])
    if limit == float("inf"):
        return limit
    used = _number(folder / names["used"])
    return max(0.0, limit - (used if used < float("inf") else 0.0) + _line(folder / "memory.stat", names["evictable"]))


def _number(file: Path) -> float:
    try:
        return float(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")


def _line(file: Path, name: str) -> float:
    try:
        return float(dict(line.split() for line in file.read_text().splitlines()).get(name, 0))
    except (OSError, ValueError):
        return 0.0
