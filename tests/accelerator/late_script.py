"""One of two ranks whose losses are read late; the words are the backend, the type of device and its module."""

import importlib
import sys
from pathlib import Path

from paceline.engine.distributed import overlap
from tests.accelerator.late_cases import PROGRAMS, outcomes, run
from tests.accelerator.target import SIMULATED
from tests.engine.distributed_cases import keep

APART = (
    *("stages=2 micro_batches=2", "stages=2 schedule=zero-bubble accumulate=2", "shards=2"),
    *("replicas=2 shard_optimizer=true", "replicas=2 shard_parameters=true"),
)
"""Of which each rank has a part of A, or of the optimizer."""

folder, (backend, kind, module) = Path(sys.argv[1]), sys.argv[2:]
importlib.import_module("tests.accelerator.process_group" if kind == SIMULATED else module)
replicas = "replicas=2", f"distributed:{backend}"
found = outcomes([replicas[0], "replicas=2 accumulate=2"], replicas[1], kind, folder / "whole")
overlap.BUCKET_BYTES, overlap.FIRST_BUCKET_BYTES = 64, 16  # a bucket for nearly each parameter
assert run(PROGRAMS["momentum"], *replicas, kind).summary["notes"]["buckets"] > 1
bucketed = outcomes([replicas[0]], replicas[1], kind, folder / "buckets", ("momentum", "clipped"))
found |= {f"{name}, in buckets": far for name, far in bucketed.items()}
for number, form in enumerate(APART):
    found |= outcomes([form], replicas[1], kind, folder / f"apart {number}", ("momentum", "clipped"))
keep(folder, "late", found)
