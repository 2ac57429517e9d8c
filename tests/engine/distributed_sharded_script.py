"""Trains all cases with divided parameters on this rank, then looks at what lies in its memory."""

import functools
import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paceline import launch
from tests.engine import programs
from tests.engine.distributed_cases import keep, told
from tests.engine.distributed_sharded_cases import CASES, EXACT, wide
from tests.ranks import asked

folder, engine, ranks = Path(sys.argv[1]), sys.argv[2], int(os.environ["WORLD_SIZE"])


def tensor_bytes() -> int:
    """Of all memory that tensors of this process hold, each piece once."""
    gc.collect()
    found = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and not isinstance(o, DTensor)]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in found)}.values())


def looking(worker: Any) -> None:
    """Three steps, and a look between two of them."""
    for made, batch in enumerate(worker.batches()):
        worker.step(batch)
        if made == 1:
            keep(folder, "memory", tensor_bytes() - before)


for name in asked(CASES if engine == "distributed:gloo" else EXACT, sys.argv[3]):
    keep(folder, name, told(CASES[name].run(ranks, engine)))
adam = programs.program(model=wide, optimizer=functools.partial(torch.optim.Adam, lr=0.01))
before = tensor_bytes()
run = launch(
    looking, adam, f"replicas={ranks} shard_parameters=true", engine=engine, steps=3, evaluate_every=100, progress=False
)
keep(folder, "wide", told(run))
