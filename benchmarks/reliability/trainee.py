"""The run that is disturbed: trains by the arguments it is given, and prints one JSON line about how it ended.

Each worker notes when it has begun a step in a file that the injector reads. It knows of faults what
``failpoints.py`` has it do: stop where it is told to, so that the injector finds it there.
"""

import functools
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import failpoints
import torch
from workloads import workload

from paceline import Run, launch
from paceline.checkpoint.reader import newest


def noting(worker: Any, *, log: str, pause_s: float, hold: dict[str, Any] | None) -> None:
    """The plain loop; a line says when which replica has begun which step, in which process."""
    with open(log, "a", buffering=1) as file:
        for step, batch in enumerate(worker.batches(), 1):
            file.write(f"{time.monotonic():.6f} {worker.replica} {step} {os.getpid()}\n")
            if hold is not None:
                failpoints.in_worker(hold, worker, step, batch)
            worker.step(batch)
            time.sleep(pause_s)  # so that kills come at all moments of a step, and not in a second of thousands


def digest(run: Run, checkpoint: str | None) -> str:
    """Return the SHA-256 of all parameters, and of the optimizer's state where a checkpoint of the end has it."""
    total = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in run.state.values()))
    found = None if checkpoint is None else newest(Path(checkpoint))[0]
    if found is not None:
        for name in sorted(found.names()):
            total.update(name.encode())
            total.update(found.read(name).contiguous().numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    """Train; the only argument is a JSON object of settings."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    folder, strategy, data = settings.pop("folder"), settings.pop("strategy"), settings.pop("data")
    program = workload(
        settings.pop("workload", "W1"), data, width=settings.pop("width", 256), samples=settings.pop("samples", None)
    )
    hold = settings.pop("hold", None)
    own = {"log": settings.pop("log"), "pause_s": settings.pop("pause_s", 0.005), "hold": hold}
    # The end is saved where nothing else asks for it, so that the digest covers the optimizer's state.
    if settings.setdefault("checkpoint", f"{folder}/end") is not None:
        settings.setdefault("checkpoint_every", "1000000 steps")
    if hold is not None:
        failpoints.in_main(hold)
    began = time.monotonic()
    run = launch(functools.partial(noting, **own), program, strategy, progress=False, **settings)
    summary = run.summary
    result = {
        "rank": int(os.environ.get("RANK", "0")),
        "parameters": digest(run, None),
        "digest": digest(run, settings["checkpoint"]),
        "updates": summary["updates"],
        "gradients": summary["gradients"],
        "applied": summary["applied"],
        "discarded": summary["discarded"],
        "nonfinite": summary["nonfinite"],
        "finite": all(bool(torch.isfinite(tensor).all()) for tensor in run.state.values()),
        "staleness_max": summary["staleness_max"],
        "left": [f"replica {each.replica}: {each.reason} after {each.time_s:.1f} s" for each in run.left],
        "notes": summary["notes"],
        "seconds": summary["seconds"],
        "whole_s": time.monotonic() - began,
        "interrupted": summary["interrupted"],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "peak_memory_kb": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
