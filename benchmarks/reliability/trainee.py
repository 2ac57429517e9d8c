"""The run that is disturbed: trains by the arguments it is given, and prints one JSON line about how it ended.

Each worker notes when it has begun a step in a file that the injector reads; nothing else in it knows of faults.
"""

import functools
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline import Program, Run, launch

SAMPLES, FEATURES, CLASSES = 4096, 784, 10


def model(width: int) -> nn.Module:
    """Return the MLP that the scorecard's first workload names, 784-256-10, or one of another width."""
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, CLASSES))


def program(width: int) -> Program:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return Program(
        model=functools.partial(model, width),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        train=(inputs, targets),
        batch_size=32,
        name="reliability",
    )


def noting(worker: Any, *, log: str, pause_s: float) -> None:
    """The plain loop; a line says when which replica has begun a step."""
    with open(log, "a", buffering=1) as file:
        for batch in worker.batches():
            file.write(f"{time.monotonic():.6f} {worker.replica}\n")
            worker.step(batch)
            time.sleep(pause_s)  # so that kills come at all moments of a step, and not in a second of thousands


def digest(run: Run) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in run.state.values())).hexdigest()


def main() -> None:
    """Train; the only argument is a JSON object of settings."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    width, strategy = settings.pop("width", 256), settings.pop("strategy")
    log, pause_s = settings.pop("log"), settings.pop("pause_s", 0.005)
    loop = functools.partial(noting, log=log, pause_s=pause_s)
    run = launch(loop, program(width), strategy, progress=False, **settings)
    summary = run.summary
    print(
        json.dumps(
            {
                "digest": digest(run),
                "updates": summary["updates"],
                "gradients": summary["gradients"],
                "left": [exit_.reason for exit_ in run.left],
                "notes": summary["notes"],
                "seconds": summary["seconds"],
                "descriptors": len(os.listdir("/proc/self/fd")),
                "peak_memory_kb": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]),
            }
        )
    )


if __name__ == "__main__":
    main()
