"""Trains all cases on each of the meshes, all of which have as many ranks as there are."""

import sys
from pathlib import Path

from tests.engine.distributed_cases import keep
from tests.engine.replicated_cases import CASES, OTHERS, trained

folder, engine, meshes = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
for mesh in meshes:
    sharded = "shards" in mesh
    for name, case in ({"encoder": OTHERS["encoder"]} if sharded else CASES).items():
        run = trained(case, mesh, engine)
        keep(folder, f"{name} {mesh}", (run.model.state_dict(), run.summary["train_loss"]))
