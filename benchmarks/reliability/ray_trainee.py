"""A comparator: Ray Train's TorchTrainer on Gloo with max_failures, reporting a checkpoint every so many steps.

It takes the same words as ``trainee.py`` and writes the same log, so that the same injector disturbs it.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig

WORKERS = 4


def loop(settings: dict[str, Any]) -> None:
    """Train in one worker."""
    sys.path.insert(0, settings["code"])
    from workloads import workload

    torch.set_num_threads(1)
    rank, program, step = ray.train.get_context().get_world_rank(), workload("W1", settings["data"]), 0
    model = program.build()
    optimizer = program.optimizer(model.parameters())
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = ray.train.torch.prepare_model(model)
    inputs, targets = program.train
    with open(settings["log"], "a", buffering=1) as log:
        while step < settings["steps"]:
            step += 1
            first = (step * WORKERS + rank) * 32 % (len(targets) - 32)
            log.write(f"{time.monotonic():.6f} {rank} {step} {os.getpid()}\n")
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(inputs[first : first + 32]), targets[first : first + 32])
            loss.backward()
            optimizer.step()
            if step % settings["checkpoint_every"] == 0:
                _report(rank, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
            time.sleep(settings.get("pause_s", 0.005))


def _report(rank: int, state: dict[str, Any]) -> None:
    if rank != 0:
        ray.train.report({"step": state["step"]})
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder, "state.pt"))
        ray.train.report({"step": state["step"]}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main() -> None:
    """Train; the only argument is a JSON object of settings."""
    settings: dict[str, Any] = json.loads(sys.argv[1]) | {"code": str(Path(__file__).resolve().parent)}
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config=settings,
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            storage_path=settings["folder"], name="train", failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()
    print(json.dumps({"steps": settings["steps"]}), flush=True)


if __name__ == "__main__":
    main()
