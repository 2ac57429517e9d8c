"""Tries the cells of the distributed engine that as many ranks make as there are, and leaves what came of them.

The words are the engine, and on an accelerator its type of device and the module that has it.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from tests.accelerator.target import Target
from tests.combinations import FORMS, WORKERS, cells, tried

folder, (engine, *words), ranks = Path(sys.argv[1]), sys.argv[2:], int(os.environ["WORLD_SIZE"])
target = Target(*words) if words else None
if target is not None:
    importlib.import_module(target.module)
forms = [form for form in FORMS if WORKERS[form] == ranks]
found = [(*cell, tried(cell, engine, target)) for cell in cells("distributed", forms)]
if os.environ["RANK"] == "0":
    (folder / f"{ranks}.json").write_text(json.dumps(found), encoding="utf-8")
