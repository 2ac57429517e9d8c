"""What a device needs beside equal results: its backend's collectives as Paceline calls them, and memory for A."""

import functools
import importlib
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore

from paceline import Program, train
from paceline.device import of_worker
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.launch_env import LaunchEnv
from paceline.engine.spmd.process_group import ProcessGroup
from paceline.engine.spmd.rank_registry import RankRegistry, StoreSignals
from paceline.engine.spmd.watchdog import CollectiveWatchdog
from tests.accelerator.target import SIMULATED

TIMEOUT_S = 60.0

WIDTH = 4096
"""Of one layer whose weight, 64 MiB in float32, is all of A: beside it what libraries take for themselves is little."""

STATE_BYTES = 16
"""Of an element in float32 under Adam, as the planner counts: parameter, gradient and two moments."""

STEPS = 4


def collectives(kind: str, backend: str) -> None:
    """Raise AssertionError unless each collective of one rank leaves what that rank has, on the device and the host."""
    if kind == SIMULATED:
        importlib.import_module("tests.accelerator.process_group")
    device, bound, world = of_worker(kind, 0), timedelta(seconds=TIMEOUT_S), LaunchEnv(0, 1, 1, one_host=True)
    words = backend if kind == SIMULATED else f"cpu:gloo,{kind}:{backend}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(words, store=HashStore(), rank=0, world_size=1, timeout=bound)
    signals = HashStore()
    group = ProcessGroup(dist.group.WORLD, signals, backend, bound)
    watchdog = CollectiveWatchdog(StoreSignals(signals, 0, 1), RankRegistry(world, group), TIMEOUT_S, backend)
    communicator = Communicator(group, watchdog, str(device))
    for place in (device, torch.device("cpu")):
        _each_collective(communicator, torch.arange(8.0, device=place))
    dist.destroy_process_group()


def _each_collective(communicator: Communicator, x: Tensor) -> None:
    summed, scattered, gathered, sent = x.clone(), torch.zeros_like(x), torch.zeros_like(x), x.clone()
    communicator.all_reduce([summed], "a sum")
    communicator.wait(communicator.reduce_scatter(x[None], scattered), "a part")
    communicator.wait(communicator.all_gather(gathered[None], x), "all parts")
    communicator.broadcast(sent, 0, "a vector")
    reduced = [communicator.reduced(x, "a number", largest=largest) for largest in (False, True)]
    for found in (summed, scattered, gathered, sent, *reduced):
        assert found.device == x.device
        assert torch.equal(found, x), found


def memory(kind: str) -> Mapping[str, float]:
    """Return bytes of the device for an element of A: the most that were allocated, and what is predicted."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, WIDTH, generator=draw)
    program = Program(
        model=functools.partial(nn.Linear, WIDTH, WIDTH, bias=False),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
        train=(inputs, inputs),
        batch_size=4,
    )
    torch.accelerator.reset_peak_memory_stats()
    train(program, f"device={kind}", engine="distributed", steps=STEPS, evaluate_every=10 * STEPS, progress=False)
    return {"allocated": torch.accelerator.max_memory_allocated() / WIDTH**2, "predicted": STATE_BYTES}
