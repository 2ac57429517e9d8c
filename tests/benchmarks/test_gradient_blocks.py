"""The benchmark of blocks of gradients: each row is there, and blocks are fewer bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_row_is_printed(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "scheduling" / "gradients.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(
        [sys.executable, *command, "--steps", "3", "--seeds", "1"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^\| `(\S+)` \| .* \| ([\d,]+) \|$", done.stdout, re.M))
    sent = {name: int(found.replace(",", "")) for name, found in rows.items()}
    assert len(sent) == 7
    dense = sent["none"]
    assert abs(sent["blocks:ratio=0.5,size=64"] - dense / 2) < 2 * 64 * 8, "to a block"
    assert sent["blocks:ratio=0.03,size=64"] < dense / 20
