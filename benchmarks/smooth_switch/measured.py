"""What is measured on this host and then given to virtual time: how long a gradient takes, and Ray's server."""

import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from data import RANDOM, program

from paceline.program import as_tensors

FILE = Path(__file__).with_name("measured.json")

TRIALS = 31


def gradient_s(dataset: str, folder: Path | None, batch_size: int, hidden: int = 64) -> float:
    """Seconds of one gradient on one core: the median of :data:`TRIALS`, after as many to warm up."""
    made = program(dataset, folder, 0, hidden, 2)
    pair, model, taken = as_tensors(made.train), made.build(), []
    assert pair is not None, f"{dataset} has no tensors"
    torch.set_num_threads(1)
    for trial in range(2 * TRIALS):
        batch = slice(trial * batch_size, (trial + 1) * batch_size)
        began = time.perf_counter()
        model.zero_grad()
        made.loss(model(pair[0][batch]), pair[1][batch]).backward()
        taken.append(time.perf_counter() - began)
    return median(taken[TRIALS:])


def measure(folders: dict[str, Path]) -> dict[str, float]:
    """Seconds of a gradient by ``dataset/batch size``."""
    wanted = [(RANDOM, b) for b in (8, 16, 32, 64, 128)] + [(d, b) for d in folders for b in (32, 64)]
    return {f"{dataset}/{b}": round(gradient_s(dataset, folders.get(dataset), b), 6) for dataset, b in wanted}


def write(**values: object) -> None:
    """Add to the file, each with the machine that it was measured on."""
    known = read() if FILE.exists() else {}
    machines = dict(known.get("machine", {})) | dict.fromkeys(values, f"{_processor()}, torch {torch.__version__}")
    beside = FILE.with_suffix(".new")
    beside.write_text(json.dumps(known | {"machine": machines} | values, indent=2) + "\n")
    beside.rename(FILE)


def read() -> dict[str, dict[str, Any]]:
    """What has been measured."""
    values: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return values


def machine(name: str) -> str:
    """What a value was measured on."""
    return str(read()["machine"].get(name, "an unknown machine"))


def compute_s(dataset: str, batch_size: int) -> float:
    """Seconds of a gradient, as measured."""
    return float(read()["gradient_s"][f"{dataset}/{batch_size}"])


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    import sys

    print(measure(dict(zip(("mnist", "cifar10"), map(Path, sys.argv[1:]), strict=False))))
