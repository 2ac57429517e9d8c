"""What a row was measured on."""

import datetime
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

Facts = dict[str, str]


def machine() -> Facts:
    """Columns for a row: processor, cores that this process may use, system, torch, day."""
    import torch

    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"Linux {platform.release().split('-')[0]}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def described(rows: Iterable[Mapping[str, str]]) -> str:
    """The machines of some rows in words, the days of each as from and to."""
    days: dict[str, list[str]] = {}
    for row in rows:
        text = (
            f"{row['cores']} cores of {row['processor']}, {row['system']}, torch {row['torch']}, Python {row['python']}"
        )
        days.setdefault(text, []).append(row["date"])
    return "; ".join(f"{text}, {_span(dates)}" for text, dates in days.items())


def _span(days: list[str]) -> str:
    first, last = min(days), max(days)
    return first if first == last else f"{first} to {last}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
