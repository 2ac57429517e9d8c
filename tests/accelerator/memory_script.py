"""One rank of runs whose memory is measured; the words are the backend, the type of device and modules to import."""

import importlib
import sys
from pathlib import Path

from paceline.engine.spmd.launch_env import LaunchEnv
from tests.accelerator.memory_cases import PROGRAMS, STRATEGIES, allocated
from tests.engine.distributed_cases import keep

folder, (backend, kind, *modules) = Path(sys.argv[1]), sys.argv[2:]
for module in modules:
    importlib.import_module(module)
strategies, engine = STRATEGIES[LaunchEnv.current().size], f"distributed:{backend}"
keep(
    folder,
    "memory",
    {f"{name}: {text}": allocated(name, text, engine, kind) for name in PROGRAMS for text in strategies},
)
