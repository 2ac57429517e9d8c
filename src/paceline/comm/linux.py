"""Linux system calls that Python lacks, the scheduler, and the memory that is available to this process.

Available memory is bounded by the machine, and by the limits of the cgroups of this process.

Pythons built against an old C library (those of uv and conda, up to 2026) leave ``os.memfd_create`` and
``os.pidfd_open`` out although the kernel has the calls; there they are made by number.
"""

import contextlib
import ctypes
import fcntl
import os
import platform
import signal
import struct
import sys
from collections import namedtuple
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from paceline.core.errors import PacelineError

MFD_CLOEXEC = 1
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # the same number on every architecture
# struct pidfd_info: a mask, the cgroup, eleven ids, the exit status.
_PIDFD_INFO, _PIDFD_GET_INFO, _PIDFD_INFO_EXIT = struct.Struct("=QQ11Ii"), 0xC040FF0B, 1 << 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT_BYTES, _NEVER = 2**25, 2**31 - 1  # glibc takes no larger mmap threshold, and an int
_SCHED_SETATTR, _SCHED_GETATTR, _RESET_ON_FORK = 314, 315, 1
_SCHED_ATTR = struct.Struct("=IIQiIQQQII")
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_RENAMEAT2 = {"x86_64": 316, "aarch64": 276}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def memfd_create(name: str) -> int:
    """Create an anonymous file in memory, closed on exec, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, MFD_CLOEXEC)
    return _call("memfd_create", _MEMFD_CREATE.get(platform.machine()), ctypes.c_char_p(name.encode()), MFD_CLOEXEC)


def pidfd_open(pid: int) -> int:
    """Return a file descriptor that stands for process ``pid``, closed on exec."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call("pidfd_open", _PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Send signal ``number`` to the process behind ``pidfd``."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _call("pidfd_send_signal", _PIDFD_SEND_SIGNAL, pidfd, number, None, 0)


def pidfd_exit_status(pidfd: int) -> int | None:
    """Return the status, as of waitpid, of a process that has ended and was waited for; None: Linux before 6.15."""
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *([0] * 13)))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(info)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def exchange(first: Path, second: Path) -> None:
    """Let two files or folders swap their names, in one step; raise OSError (EINVAL) where the file system can't."""
    number, names = _RENAMEAT2.get(platform.machine()), [ctypes.c_char_p(os.fsencode(path)) for path in (first, second)]
    _call("renameat2", number, _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)


def keep_freed_memory() -> None:
    """Let this process keep what it frees, for what it allocates next.

    A training step frees and allocates the same blocks again and again. By its defaults glibc gives large ones back to
    the system at once, and the next step pays a page fault for every 4 KiB of them. Other C libraries are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_back_freed_memory() -> None:
    """Return freed memory to the system, after a start that needed more than the steps will."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def prompt(slice_ns: int = 100_000) -> Iterator[None]:
    """Context manager: when this thread wakes, it runs before those that compute.

    It requests short time slices, which Linux grants from 6.12 on, and for which it then interrupts longer ones. The
    thread gets no more processor time than before. On other systems this does nothing.
    """
    before = _scheduling()
    if before is None:
        yield
        return
    _schedule(before._replace(flags=before.flags | _RESET_ON_FORK, runtime_ns=slice_ns))  # children get no short slices
    try:
        yield
    finally:
        _schedule(before)
        if _scheduling() != before:  # an unprivileged process may not clear the flag
            _schedule(before._replace(flags=before.flags | _RESET_ON_FORK))


@contextlib.contextmanager
def considerate() -> Iterator[None]:
    """Context manager: when this thread wakes, it waits until a thread that computes stops.

    With more of these than cores, interrupting one costs it the contents of its caches, while a Δ that waits for a
    moment costs nothing: another thread computes meanwhile. On other systems this does nothing.
    """
    if not sys.platform.startswith("linux") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


# The first fields of struct sched_attr; runtime_ns is the length of a slice.
_Scheduling = namedtuple(
    "_Scheduling", "size policy flags nice priority runtime_ns deadline_ns period_ns clamp_min clamp_max"
)


def _scheduling() -> _Scheduling | None:
    """Return this thread's attributes; None if it has no slices that can be requested."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None
    attributes = ctypes.create_string_buffer(_SCHED_ATTR.size)
    ctypes.CDLL(None).syscall(_SCHED_GETATTR, 0, attributes, _SCHED_ATTR.size, 0)
    scheduling = _Scheduling._make(_SCHED_ATTR.unpack(attributes.raw))
    return scheduling if scheduling.policy == os.SCHED_OTHER and scheduling.runtime_ns else None


def _schedule(attributes: _Scheduling) -> None:
    ctypes.CDLL(None).syscall(_SCHED_SETATTR, 0, _SCHED_ATTR.pack(*attributes), 0)


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

# Names of the files of cgroup v2, and of the line of memory.stat for pages of files that can be evicted.
SECOND: Mapping[str, str] = {"limit": "memory.max", "used": "memory.current", "evictable": "inactive_file"}

# The same of cgroup v1.
FIRST: Mapping[str, str] = {
    "limit": "memory.limit_in_bytes",
    "used": "memory.usage_in_bytes",
    "evictable": "total_inactive_file",
}


def available_bytes() -> int:
    """Return how much memory may still be filled: what is free, swap included, within the limit of a container."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text() if groups.exists() else ""
    return int(min([free, *(left(folder, names) for folder, names in limited(lines, ROOT))]))


def limited(lines: str, root: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Find the folders of the cgroups that may bound a process's memory, and the names of their files.

    In a container its own group is mounted as the root, on a host it is the path in /proc/self/cgroup.

    Args:
        lines: contents of /proc/self/cgroup: ``hierarchy:controllers:path``, a line each.
        root: where groups are mounted.
    """
    for line in lines.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from (((root / part), SECOND) for part in ("", path.lstrip("/")))
        elif "memory" in controllers.split(","):
            yield from (((root / "memory" / part), FIRST) for part in ("", path.lstrip("/")))


def left(folder: Path, names: Mapping[str, str]) -> float:
    """Return the bytes that a cgroup may still fill; infinite without a limit."""
    limit, used = _number(folder / names["limit"]), _number(folder / names["used"])
    if limit == float("inf"):
        return limit
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
