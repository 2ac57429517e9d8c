"""Trains replicas of several ranks that step by themselves, and keeps what they come to."""

import sys
from pathlib import Path

from tests.engine.distributed_cases import keep
from tests.engine.local_steps_cases import CASES
from tests.ranks import asked

for name, case in asked(CASES, sys.argv[2]).items():
    run = case.run("distributed")
    keep(Path(sys.argv[1]), name, (dict(run.state), run.summary["updates"], run.summary["train_loss"]))
