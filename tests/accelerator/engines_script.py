"""One rank of runs on an accelerator; the words are the backend, the type of device and the module that has it."""

import importlib
import sys
from pathlib import Path

from paceline.engine.spmd.launch_env import LaunchEnv
from tests.accelerator.engine_cases import OF_FOUR, OF_TWO, PROGRAMS, UNFLUSHED, outcome
from tests.accelerator.target import SIMULATED
from tests.engine.distributed_cases import keep

folder, (backend, kind, module) = Path(sys.argv[1]), sys.argv[2:]
importlib.import_module(module)
asked = dict[str, list[str]]()
if kind == SIMULATED:
    from tests.accelerator.process_group import SimProcessGroup

    asked = SimProcessGroup.asked
size, engine = LaunchEnv.current().size, f"distributed:{backend}"
cases = [(name, text) for name in ("momentum", "clipped") for text in OF_TWO]
cases += [*(("momentum", text) for text in UNFLUSHED), *((name, "replicas=2") for name in PROGRAMS)]
if kind == SIMULATED:  # types draw other numbers, and so do stages that are cut elsewhere
    cases += [("dropout", text) for text in ("stages=2 cuts=2", "shards=2")]
found, order = {}, dict[str, list[str]]()
for name, text in cases if size == 2 else [("clipped", text) for text in OF_FOUR]:
    asked.clear()
    found[f"{name} {text}"] = outcome(name, text, engine, kind)
    order |= {f"{name} {text}:{what}": calls for what, calls in asked.items()}
keep(folder, "outcomes", found)
keep(folder, "asked", order)
