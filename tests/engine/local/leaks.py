"""What this process holds."""

import gc
import os
from collections import Counter


def files() -> Counter[str]:
    """Its open files, by kind."""
    gc.collect()
    names: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            names[os.readlink(f"/proc/self/fd/{fd}").split(":[")[0]] += 1
        except FileNotFoundError:  # the listing's own
            continue
    return names


def since(before: Counter[str]) -> Counter[str]:
    """The files that it has open beyond those of `before`; what earlier tests left may have been closed meanwhile."""
    return files() - before
