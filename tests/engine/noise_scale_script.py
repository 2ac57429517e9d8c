"""Trains on this rank what is told of noise."""

import os
import sys
from pathlib import Path

from paceline.engine.distributed import overlap
from tests.engine.distributed_cases import keep, told
from tests.engine.noise_cases import CASES, OVERLAPPED
from tests.ranks import asked

folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
for name, case in asked(CASES, sys.argv[2]).items():
    keep(folder, name, told(case.run(ranks // case.workers, "distributed")))
overlap.BUCKET_BYTES, overlap.FIRST_BUCKET_BYTES = 64, 16
overlap.SENDING_CORES = -1  # also where ranks have no core for themselves
for name in asked(dict.fromkeys(OVERLAPPED), sys.argv[2]):
    keep(folder, f"{name}, in buckets", told(CASES[name].run(ranks, "distributed:gloo")))
