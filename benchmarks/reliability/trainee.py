"""The run that is disturbed: trains by the arguments it is given, and prints one JSON line about how it ended.

Each worker notes when it has begun a step in a file that the injector reads. It knows of faults what
``failpoints.py`` has it do: stop where it is told to, so that the injector finds it there.
"""

import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import failpoints
import torch
from workloads import accuracy_of, samples_of, with_indices, workload

from paceline import Run, launch
from paceline.checkpoint.reader import newest


@dataclass(frozen=True)
class Loop:
    """The plain loop; a line says when which replica has begun which step, in which process.

    Args:
        log: of these lines.
        pause_s: after each step, so that kills come at all moments of a step, and not in a second of thousands.
        hold: what ``failpoints.in_worker`` is to do.
        indices: another log, of the samples that a step uses, before and after it.
    """

    log: str
    pause_s: float
    hold: dict[str, Any] | None
    indices: str | None

    def __call__(self, worker: Any) -> None:
        pid = os.getpid()
        with open(self.log, "a", buffering=1) as file, open(self.indices or os.devnull, "a", buffering=1) as samples:
            for step, batch in enumerate(worker.batches(), 1):
                file.write(f"{time.monotonic():.6f} {worker.replica} {step} {pid}\n")
                numbers = "" if self.indices is None else " ".join(map(str, batch[1][1].tolist()))
                samples.write(f"begun {pid} {step} {numbers}\n")
                if self.hold is not None:
                    failpoints.in_worker(self.hold, worker, step, batch)
                worker.step(batch)
                samples.write(f"done {pid} {step} {numbers}\n")
                time.sleep(self.pause_s)


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
    hold, numbered = settings.pop("hold", None), settings.pop("indices", False)
    if numbered:
        program = with_indices(program)
    indices, digests = f"{folder}/indices" if numbered else None, settings.pop("digests", True)
    loop = Loop(settings.pop("log"), settings.pop("pause_s", 0.005), hold, indices)
    # The end is saved where nothing else asks for it, so that the digest covers the optimizer's state.
    if settings.setdefault("checkpoint", f"{folder}/end") is not None:
        settings.setdefault("checkpoint_every", "1000000 steps")
    if hold is not None:
        failpoints.in_main(hold)
    failpoints.note_remarks(Path(folder), arrivals=settings.pop("arrivals", False))
    began = time.monotonic()
    run = launch(loop, program, strategy, progress=False, **settings)
    summary = run.summary
    result = {
        "rank": int(os.environ.get("RANK", "0")),
        "parameters": digest(run, None) if digests else None,
        "digest": digest(run, settings["checkpoint"]) if digests else None,
        "updates": summary["updates"],
        "gradients": summary["gradients"],
        "gradients_per_s": summary["gradients_per_s"],
        "applied": summary["applied"],
        "discarded": summary["discarded"],
        "nonfinite": summary["nonfinite"],
        "finite": all(bool(torch.isfinite(tensor).all()) for tensor in run.state.values()),
        "staleness_max": summary["staleness_max"],
        "left": [f"replica {each.replica}: {each.reason} after {each.time_s:.1f} s" for each in run.left],
        "notes": summary["notes"],
        "samples": samples_of(program),
        "accuracy": accuracy_of(run, program, data) if numbered else None,
        "seconds": summary["seconds"],
        "whole_s": time.monotonic() - began,
        "interrupted": summary["interrupted"],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "peak_memory_kb": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]),
    }
    sys.stdout.write(json.dumps(result) + "\n")  # at once, for other ranks write to the same pipe


if __name__ == "__main__":
    main()
