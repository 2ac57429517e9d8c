"""Trains all cases in as many shards as there are ranks, and looks at what each of them holds in the end."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.engine.distributed.model_parallel_shard import ModelParallelShard
from paceline.engine.spmd.rank_context import RankSetup
from paceline.replica.tensor.placements import Shard
from tests.engine.distributed_cases import keep
from tests.engine.tensor_cases import CASES, largest_part
from tests.ranks import asked

folder, engine, shards = Path(sys.argv[1]), sys.argv[2], int(os.environ["WORLD_SIZE"])
shares: list[ModelParallelShard] = []


def remembered(rank_setup: RankSetup) -> ModelParallelShard:
    shares.append(ModelParallelShard(rank_setup))
    return shares[-1]


importlib.import_module("paceline.engine.distributed.distributed_run").ModelParallelShard = remembered  # type: ignore[attr-defined]


def differing(share: ModelParallelShard, whole: dict[str, Any]) -> list[str]:
    """The tensors of which this shard does not hold, to the bit, its part of what the run returned."""
    lies, found = share._ranks.placements, []
    for name, mine in share.state.named():
        how = lies.get(name)
        part = how.take(whole[name], share.coordinate.shard) if isinstance(how, Shard) else whole[name]
        if not torch.equal(mine, part):
            found.append(name)
    return found


for name, case in asked(CASES, sys.argv[3]).items():
    run = case.run(shards, engine)
    told = {
        "bytes": run.summary["parameter_bytes"],
        "bound": largest_part(case, shards),
        "differing": differing(shares[-1], dict(run.state)),
        "interrupted": run.summary["interrupted"],
    }
    keep(folder, name, (run.model.state_dict(), told))
