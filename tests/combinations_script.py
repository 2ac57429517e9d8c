"""Tries the cells of the distributed engine that as many ranks make as there are, and leaves what came of them."""

import json
import os
import sys
from pathlib import Path

from tests.combinations import FORMS, WORKERS, cells, tried

folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
forms = [form for form in FORMS if WORKERS[form] == ranks]
found = [(*cell, tried(cell, "distributed")) for cell in cells("distributed", forms)]
if os.environ["RANK"] == "0":
    (folder / f"{ranks}.json").write_text(json.dumps(found), encoding="utf-8")
