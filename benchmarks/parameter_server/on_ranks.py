"""Paceline under torchrun with workers that compute nothing; the server is a thread of rank 0, beside its worker."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
from on_ray import by_stream
from window import WARM_UP_S

from paceline.api.train import launch


def rates(*, workers: int, parameters: int, optimizer: str, seconds: float) -> dict[str, float]:
    """Updates a second, the first second counted with the others, as of the Ray engine."""
    arguments = json.dumps([workers, parameters, optimizer, seconds])
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, __file__, arguments]
    done = subprocess.run(
        command, check=False, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"torchrun ended with exit code {done.returncode}:\n{done.stderr}")
    return {"ranks": float(done.stdout.splitlines()[-1])}


def main(workers: int, parameters: int, optimizer: str, seconds: float) -> None:
    """Be a rank; the first one prints the rate."""
    strategy = f"replicas={workers} threads=1 aggregation=asynchronous"
    settings: dict[str, Any] = {"seconds": seconds + WARM_UP_S, "evaluate_every": 1e6, "progress": False}
    program = programs.trivial(parameters, optimizer)
    summary = launch(by_stream, program, strategy, engine="distributed", **settings).summary
    if os.environ["RANK"] == "0":
        print(summary["gradients"] / summary["seconds"])


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
