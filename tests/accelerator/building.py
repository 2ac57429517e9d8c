"""Builds the simulated accelerator that is partly in C++; importing this module builds nothing."""

import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

from torch.utils import cpp_extension

SOURCE = Path(__file__).parent / "cpp" / "device.cpp"
BUILT = Path(__file__).parents[2] / "build" / "paceline_simulated_device"
"""A folder of this checkout: in torch's own one, two checkouts would build it anew in turns."""


def missing() -> str:
    """Return what this host lacks to build it; nothing if it lacks nothing."""
    lacks = [name for name in ("ninja", "g++") if shutil.which(name) is None]
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        lacks.append("Python.h")
    return f"it can't be built without {', '.join(lacks)}" if lacks else ""


def build() -> ModuleType:
    """Build the extension, unless it has been built from these files, and load it."""
    BUILT.mkdir(parents=True, exist_ok=True)
    # Without optimisation it takes half as long to build, and it computes little.
    return cpp_extension.load(BUILT.name, [str(SOURCE)], extra_cflags=["-O0"], build_directory=str(BUILT))
