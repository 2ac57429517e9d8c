"""One rank of runs on the simulated accelerator; the word is the backend."""

import sys
from pathlib import Path

from tests.accelerator import process_group  # isort: skip (installs the device)
from paceline.engine.spmd.launch_env import LaunchEnv
from tests.accelerator.engine_cases import OF_FOUR, OF_TWO, PROGRAMS, outcome
from tests.engine.distributed_cases import keep

assert process_group.NAME == "simshm"
folder, backend = Path(sys.argv[1]), sys.argv[2]
size = LaunchEnv.current().size
cases = {2: OF_TWO, 4: OF_FOUR}[size]
names = {2: ("momentum", "clipped"), 4: ("clipped",)}[size]
found = {f"{name} {text}": outcome(name, text, f"distributed:{backend}") for name in names for text in cases}
if size == 2:
    found |= {f"{name} replicas=2": outcome(name, "replicas=2", f"distributed:{backend}") for name in PROGRAMS}
keep(folder, "outcomes", found)
