"""What a run leaves beside its model: spans, figures, a folder, and what the command prints."""

import contextlib
import functools
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import launch, train
from paceline.cli.main import main
from tests.engine import programs
from tests.engine.distributed_cases import attempt, keep, told

folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
QUIET: dict[str, Any] = {"engine": "distributed", "progress": False}
STRATEGY = f"replicas={ranks}"
RECEIVED = 128
"""Where ``struct tcp_info`` (linux/tcp.h) has the bytes that have come from the other side."""


def received_bytes() -> int:
    """What this process's TCP connections have brought, as the system counts it; nothing is on its way meanwhile."""
    total = 0
    dist.barrier()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                total += struct.unpack_from("<Q", info, RECEIVED)[0]
    dist.barrier()
    return total


def counting(worker: Any) -> None:
    """Ten steps between two readings; the connections are there after the first step."""
    batches = worker.batches()
    worker.step(next(batches))
    before = received_bytes()
    for _ in range(10):
        worker.step(next(batches))
    keep(folder, "sockets", (received_bytes() - before) / 10)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20_000), nn.Tanh(), nn.Linear(20_000, 3)).double()


big = programs.program(model=wide)
keep(folder, "counted", told(launch(counting, big, STRATEGY, steps=11, **QUIET | {"engine": "distributed:gloo"})))
for name, words in (("one optimizer each", ""), ("divided", "shard_optimizer=true")):
    adam = programs.program(model=wide, optimizer=functools.partial(torch.optim.Adam, lr=0.01))
    keep(folder, name, told(train(adam, f"{STRATEGY} {words}", steps=3, **QUIET)))
slow = "fraction=0.5 constant:value=0.1"
keep(folder, "traced", told(train(programs.program(), STRATEGY, steps=8, trace=True, delay=slow, **QUIET)))
keep(
    folder,
    "excused",
    attempt(
        lambda: told(
            train(programs.program(), STRATEGY, steps=1, delay="fraction=0.5 constant:value=4", timeout_s=1.0, **QUIET)
        )
    ),
)
keep(folder, "timed", told(train(programs.program(test=programs.data()), STRATEGY, seconds=0.5, **QUIET)))
train(programs.program(), STRATEGY, steps=2, out=folder / "saved", **QUIET)
for backend in ("shm", "gloo", "hierarchical"):
    engine = f"distributed:{backend}"
    keep(folder, backend, told(train(programs.program(), STRATEGY, steps=13, engine=engine, progress=False)))
for words in (
    ("compare", "--strategy", STRATEGY, "--strategy", f"{STRATEGY} accumulate=2", "--out", str(folder / "compared")),
    ("train", "--strategy", STRATEGY),
):
    sys.argv = ["paceline", words[0], "digits", *words[1:], "--engine", "distributed", "--steps", "2", "--json"]
    with contextlib.suppress(SystemExit):
        main()
