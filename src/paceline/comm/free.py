"""How much memory this process may still fill: on the machine, and under the limits of the groups that it is in."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

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
