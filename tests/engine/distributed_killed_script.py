"""Trains under torchrun until rank 1 is killed, from within at a step, or from outside at any time."""

import os
import signal
import sys
from typing import Any

import torch

from paceline import launch
from tests.engine import programs

backend, at, size = sys.argv[2], int(sys.argv[3]), int(os.environ["WORLD_SIZE"])


def wide() -> torch.nn.Module:
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    return torch.nn.Sequential(torch.nn.Linear(6, 256), *layers, torch.nn.Linear(256, 3)).double()


def loop(worker: Any) -> None:
    for made, batch in enumerate(worker.batches()):
        if (made, worker.replica) == (at, 1):
            signal.raise_signal(signal.SIGKILL)
        worker.step(batch)


settings = {"seconds": 60.0, "evaluate_every": 60.0, "progress": False}
launch(loop, programs.program(model=wide), f"replicas={size}", engine=f"distributed:{backend}", **settings)
