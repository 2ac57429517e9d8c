"""What is marked "no torch" in the design imports without it, however it is reached."""

import re
import subprocess
import sys
from pathlib import Path
from pkgutil import walk_packages

import pytest

import paceline

WITHOUT_TORCH = ("core", "clock", "trace", "aggregation", "compression", "schedule", "strategy", "support", "cli")
MODULES = sorted(
    found.name for found in walk_packages(paceline.__path__, "paceline.") if found.name.split(".")[1] in WITHOUT_TORCH
)


def test_every_part_that_needs_no_torch_is_covered() -> None:
    assert {name.split(".")[1] for name in MODULES} == set(WITHOUT_TORCH)


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_imports_without_torch(part: str) -> None:
    names = [name for name in MODULES if name.split(".")[1] == part]
    code = f"import sys; sys.modules['torch'] = None\nimport {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_one_module_alone_names_a_kind_of_accelerator_in_code() -> None:
    """What CUDA, XPU and others differ in is in paceline/device.py; elsewhere there are devices."""
    source = Path(paceline.__file__).parent
    named = re.compile(r"torch\.(cuda|xpu|mps|npu|hpu)\b|\.cuda\(|is_cuda\b")
    others = (path for path in source.rglob("*.py") if path != source / "device.py")
    assert not [str(path) for path in others if named.search(path.read_text(encoding="utf-8"))]
