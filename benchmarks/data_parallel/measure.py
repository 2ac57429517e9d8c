"""A synchronous step: Paceline's distributed engine beside DDP, on Gloo and on shared memory.

    python benchmarks/data_parallel/measure.py
    python benchmarks/data_parallel/measure.py --models mlp --ranks 2 --batches 32 --pairs 9

All sides take turns in the same processes, one thread each. A time is the median of all turns, each turn's the median
of its steps on its slowest rank; a ratio is the median of the turns'.
"""

import argparse
import os
import socket
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import MODELS
from sides import SIDES, middle

import paceline.comm

AGAINST = "ddp gloo"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what was asked for, and print it as it comes."""
    said = parser().parse_args(arguments)
    for ranks in said.ranks:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            mp.spawn(_rank, (ranks, port, f"{folder}/store", said), ranks)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, nargs="+", default=[2])
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    made.add_argument("--batches", type=int, nargs="+", default=[32, 128], help="samples of a rank")
    made.add_argument("--pairs", type=int, default=9)
    made.add_argument("--steps", type=int, default=20, help="of a turn")
    made.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    return made


def _rank(rank: int, ranks: int, port: int, store: str, said: argparse.Namespace) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    paceline.comm.register()
    dist.init_process_group("shm", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    for model in said.models:
        for batch in said.batches:
            found = _turns(model, batch, said)
            if rank == 0:
                _tell(model, batch, ranks, found)
    dist.destroy_process_group()


def _turns(model: str, batch: int, said: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step, a turn each."""
    found: dict[str, list[float]] = {side: [] for side in said.sides}
    for turn in range(said.pairs):
        for side in said.sides if turn % 2 else reversed(said.sides):
            dist.barrier()
            found[side].append(middle(SIDES[side](model, batch, said.steps)))
    return found


def _tell(model: str, batch: int, ranks: int, found: dict[str, list[float]]) -> None:
    for side, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(times, found.get(AGAINST, times), strict=True))
        took = f"{1e3 * statistics.median(times):8.2f} ms"
        print(f"{model:12} batch {batch:4} {ranks} ranks  {side:22} {took} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
