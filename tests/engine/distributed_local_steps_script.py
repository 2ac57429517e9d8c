"""Trains replicas of several ranks that step by themselves, and keeps what they come to."""

import sys
from pathlib import Path

from tests.engine.distributed_cases import keep
from tests.engine.local_steps_cases import CASES

for name, case in CASES.items():
    run = case.run("distributed")
    keep(Path(sys.argv[1]), name, (dict(run.state), run.summary["updates"], run.summary["train_loss"]))
