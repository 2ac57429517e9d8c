"""Trains all cases on a mesh of as many ranks as there are."""

import sys
from pathlib import Path

from tests.engine.distributed_cases import keep
from tests.engine.hybrid_cases import CASES, NORMALISED

folder, engine, mesh = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
for name, case in (CASES | NORMALISED).items():
    run = case.run(mesh, engine)
    told = {"interrupted": run.summary["interrupted"], "bytes": run.summary["parameter_bytes"]}
    keep(folder, name, (run.model.state_dict(), told))
