"""Ranks that run own loops, by launch and by join; each leaves what it has trained."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline import Program
from tests.engine.distributed_cases import keep
from tests.engine.own_loops import (
    BATCH,
    GAN_OPTIMIZERS,
    MAKERS,
    SGD,
    Gan,
    LogKeeper,
    gan_loop,
    loader,
    loop,
    make_model,
    program,
    reporting_loop,
    train,
)

folder, *words = sys.argv[1:]
size = int(os.environ.get("WORLD_SIZE", "1"))
QUIET: dict[str, Any] = {"engine": "distributed", "progress": False}


def launched(name: str, policy: str) -> None:
    program = Program(model=make_model, optimizer=MAKERS[name])
    run = paceline.launch(loop, program, f"replicas={size} aggregation={policy}", **QUIET)
    keep(Path(folder), f"launch {name} {policy}", (run.model, run.summary["updates"]))


def gan() -> None:
    run = paceline.launch(gan_loop, Program(model=Gan, optimizer=GAN_OPTIMIZERS), f"replicas={size}", **QUIET)
    keep(Path(folder), "gan", (run.model, run.summary["updates"]))


def joined(name: str, policy: str) -> None:
    model = Program(model=make_model, optimizer=SGD).build()
    optimizer = MAKERS[name](model.parameters())
    own, before = loader(BATCH // size), torch.get_num_threads()
    state: dict[str, Any] = {}
    with paceline.join(model=model, optimizer=optimizer, strategy=f"replicas={size} aggregation={policy}") as worker:
        train(model, optimizer, lambda: worker.data(own))
        if policy == "synchronous":
            state = optimizer.state_dict()
    assert "step" not in vars(optimizer)
    assert torch.get_num_threads() == before
    keep(Path(folder), f"join {name} {policy}", (model, state))


def interrupted(policy: str) -> None:
    """The first rank is sent a signal in its fifth step; no rank's loop ends by itself."""
    model = Program(model=make_model, optimizer=SGD).build()
    optimizer, steps = SGD(model.parameters()), 0
    with paceline.join(model=model, optimizer=optimizer, strategy=f"replicas={size} aggregation={policy}"):
        while True:
            steps += 1
            if steps == 5 and os.environ["RANK"] == "0":
                signal.raise_signal(signal.SIGINT)
            optimizer.zero_grad()
            model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
            optimizer.step()
    keep(Path(folder), f"interrupted {policy}", (model, steps))


if "interrupted" in words:
    for policy in ("synchronous", "local-steps:period=2", "asynchronous"):
        interrupted(policy)
elif "told" not in words:
    launched("sgd", "synchronous")
    launched("adamw", "synchronous")
    gan()
    joined("sgd", "synchronous")
    joined("adamw", "synchronous")
if not words and size == 1:
    launched("sgd", "asynchronous")
    joined("sgd", "asynchronous")
    joined("sgd", "local-steps:period=2")

if "told" in words:
    for policy in ("synchronous", "asynchronous"):
        kept_logs = LogKeeper()
        stop = {"callbacks": [kept_logs], "steps": 100_000}
        run = paceline.launch(reporting_loop, program(), f"replicas={size} aggregation={policy}", **QUIET, **stop)
        keep(Path(folder), f"told {policy}", (run.summary["stopped"], kept_logs.logged))
