"""Trains all cases as a pipeline of as many stages as there are ranks."""

import os
import sys
from pathlib import Path

from tests.engine.distributed_cases import keep
from tests.engine.pipeline_cases import CASES
from tests.ranks import asked

folder, engine = Path(sys.argv[1]), sys.argv[2]
for name, case in asked(CASES, sys.argv[3]).items():
    run = case.run(int(os.environ["WORLD_SIZE"]), engine)
    told = {"loss": run.summary["train_loss"], "interrupted": run.summary["interrupted"], "notes": run.summary["notes"]}
    keep(folder, name, (run.model.state_dict(), told))
