"""Samples the memory of a run's processes while it lasts."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import NamedTuple

import psutil

MIB = 2**20


class Sample(NamedTuple):
    """MiB. ``pss`` divides shared pages by how many share them; ``uss`` is what a process has for itself."""

    main_pss: float
    main_uss: float
    workers_pss: float
    """Of all workers together."""
    workers_uss: float


class Sampler:
    """A thread that looks at main and at the workers of a run, from when ``workers.json`` is there until it has gone.

    Args:
        folder: ``out=`` of the run.
        every_s: between two looks.
    """

    def __init__(self, folder: Path, every_s: float) -> None:
        self._roster, self._every_s = folder / "workers.json", every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                rows = json.loads(self._roster.read_text(encoding="utf-8"))
                self.samples.append(look([row["pid"] for row in rows if row["role"] == "replica"]))
            except (FileNotFoundError, psutil.NoSuchProcess):
                continue  # it has not begun, or is ending: a sample has all workers or is none


def look(workers: list[int]) -> Sample:
    """The memory of this process and of these."""
    main, *others = (psutil.Process(pid).memory_full_info() for pid in (os.getpid(), *workers))
    return Sample(
        main.pss / MIB, main.uss / MIB, sum(info.pss for info in others) / MIB, sum(info.uss for info in others) / MIB
    )


def quarters(samples: list[Sample]) -> Mapping[str, tuple[float, float]]:
    """Field -> its median in the first and in the last quarter of the samples."""
    size = max(1, len(samples) // 4)
    ends = samples[:size], samples[-size:]
    first, last = ({name: median(getattr(s, name) for s in end) for name in Sample._fields} for end in ends)
    return {name: (first[name], last[name]) for name in Sample._fields}
