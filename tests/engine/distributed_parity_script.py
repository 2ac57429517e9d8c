"""Trains all cases on this rank."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from tests.engine.distributed_cases import CASES, keep, told

folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
for name, case in CASES.items():
    keep(folder, name, told(case.run(ranks, "distributed")))
    assert not dist.is_initialized(), "the group of a run outlived it"
