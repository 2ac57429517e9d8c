"""Trains all cases as a pipeline of as many stages as there are ranks."""

import os
import sys
from pathlib import Path

from tests.engine.distributed_cases import keep
from tests.engine.streamed_cases import CASES, trained
from tests.ranks import asked

folder, engine = Path(sys.argv[1]), sys.argv[2]
for name in asked(CASES, sys.argv[3]):
    keep(folder, name, trained(name, int(os.environ["WORLD_SIZE"]), engine))
