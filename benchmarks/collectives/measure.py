"""Backend shm beside Gloo: every collective, from 1 KB to 100 MB, results compared with what they must be.

    python benchmarks/collectives/measure.py
    python benchmarks/collectives/measure.py --ranks 2 --calls all_reduce --sizes 1e3 256e3

Both backends have a group of the same processes. They take turns within one run; a time is the median of all turns, a
ratio the median of the pairs'. A call's time is the longest of all ranks.
"""

import argparse
import csv
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from calls import CALLS, FLOAT_BYTES, Case

import paceline.comm

SIZES = (1e3, 16e3, 64e3, 256e3, 1e6, 4e6, 16e6, 100e6)
"""Bytes of the largest tensor that a rank gives or gets."""

BACKENDS = ("shm", "gloo")

TURN_S = 0.05
"""How long a turn takes, about: so many calls are made in it, one at least."""

MOST_CALLS = 300


@dataclass(frozen=True)
class Row:
    """What one call takes on both."""

    call: str
    ranks: int
    size_bytes: int
    shm_us: float
    gloo_us: float
    ratio: float
    """Gloo's time by shm's: above 1 shm is quicker."""
    pairs: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what was asked for, and write it down as it comes."""
    said = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in said.ranks:
            mp.spawn(_rank, (ranks, f"{folder}/{ranks}", said), ranks)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    made.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS))
    made.add_argument("--sizes", type=float, nargs="+", default=list(SIZES), metavar="BYTES")
    made.add_argument("--pairs", type=int, default=9)
    made.add_argument("--csv", type=Path, help="also append the rows to this file")
    return made


def _rank(rank: int, ranks: int, store: str, said: argparse.Namespace) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch is renaming its collectives
    torch.set_num_threads(1)
    paceline.comm.register()
    dist.init_process_group("shm", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    for row in _rows(rank, ranks, groups, said):
        if rank == 0:
            _tell(row, said.csv)
    dist.destroy_process_group()


def _rows(rank: int, ranks: int, groups: dict[str, dist.ProcessGroup], said: argparse.Namespace) -> Iterator[Row]:
    for name in said.calls:
        for size in [0.0] if name == "barrier" else said.sizes:
            elements = max(ranks, int(size) // FLOAT_BYTES)
            cases = {backend: CALLS[name](elements, rank, ranks, group) for backend, group in groups.items()}
            times = _times(cases, said.pairs)
            middle = {backend: statistics.median(t) * 1e6 for backend, t in times.items()}
            ratio = statistics.median(g / s for s, g in zip(times["shm"], times["gloo"], strict=True))
            yield Row(
                name, ranks, int(size), round(middle["shm"], 1), round(middle["gloo"], 1), round(ratio, 2), said.pairs
            )


def _times(cases: dict[str, Case], pairs: int) -> dict[str, list[float]]:
    """Seconds a call, of each turn."""
    for backend, case in cases.items():
        _check(backend, case)
    counts = {backend: _count(case) for backend, case in cases.items()}
    found: dict[str, list[float]] = {backend: [] for backend in cases}
    for turn in range(pairs):
        for backend in BACKENDS if turn % 2 else reversed(BACKENDS):
            found[backend].append(_longest(_turn(cases[backend], counts[backend])))
    return found


def _check(backend: str, case: Case) -> None:
    case.call()
    if case.output is not None and not torch.equal(case.output, case.expected):
        raise SystemExit(f"{backend} gives something else than it must")
    if case.output is not None:
        case.output.zero_()  # or sums of sums of sums would overflow


def _count(case: Case) -> int:
    """Calls in a turn; the same on all ranks."""
    once = _longest(min(_turn(case, 1) for _ in range(3)))
    return max(1, min(MOST_CALLS, int(TURN_S / once)))


def _turn(case: Case, calls: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        case.call()
    return (time.perf_counter() - began) / calls


def _longest(seconds: float) -> float:
    """Of all ranks."""
    word = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return word.item()


def _tell(row: Row, path: Path | None) -> None:
    print(
        f"{row.call:16}{row.ranks:3} ranks {row.size_bytes:>12,} B   shm {row.shm_us:>11,.1f} µs   "
        f"gloo {row.gloo_us:>11,.1f} µs   {row.ratio:6.2f} ×",
        flush=True,
    )
    if path is not None:
        new = not path.exists()
        with path.open("a", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(row)))
            if new:
                writer.writeheader()
            writer.writerow(asdict(row))


if __name__ == "__main__":
    sys.exit(main())
