"""Trains all cases on each of the meshes, all of which have as many ranks as there are."""

import sys
from pathlib import Path

from tests.engine.distributed_cases import keep
from tests.engine.replicated_cases import CASES, OTHERS, trained
from tests.ranks import asked

folder, engine, cases, meshes = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
for mesh in meshes:
    sharded = "shards" in mesh
    for name, case in asked({"encoder": OTHERS["encoder"]} if sharded else CASES, cases).items():
        run = trained(case, mesh, engine)
        keep(folder, f"{name} {mesh}", (run.model.state_dict(), run.summary["train_loss"]))
