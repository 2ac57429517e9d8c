"""One rank of runs on an accelerator; the words are the backend, the type of device and the module that has it."""

import importlib
import sys
from pathlib import Path

from paceline.engine.spmd.launch_env import LaunchEnv
from tests.accelerator.engine_cases import OF_FOUR, OF_TWO, PROGRAMS, outcome
from tests.accelerator.target import SIMULATED
from tests.engine.distributed_cases import keep

folder, (backend, kind, module) = Path(sys.argv[1]), sys.argv[2:]
importlib.import_module("tests.accelerator.process_group" if kind == SIMULATED else module)
size, engine = LaunchEnv.current().size, f"distributed:{backend}"
cases = {2: OF_TWO, 4: OF_FOUR}[size]
names = {2: ("momentum", "clipped"), 4: ("clipped",)}[size]
found = {f"{name} {text}": outcome(name, text, engine, kind) for name in names for text in cases}
if size == 2:
    found |= {f"{name} replicas=2": outcome(name, "replicas=2", engine, kind) for name in PROGRAMS}
keep(folder, "outcomes", found)
