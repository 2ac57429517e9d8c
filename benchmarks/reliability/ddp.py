"""A comparator: plain DistributedDataParallel on Gloo, as torchrun starts it, with ``torch.save`` where asked for.

It takes the same words as ``trainee.py`` and writes the same log, so that the same injector disturbs it.
"""

import hashlib
import json
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from failpoints import flip_bit
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from workloads import workload


def main() -> None:
    """Train; the only argument is a JSON object of settings."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    bound = {"timeout": timedelta(seconds=settings["timeout_s"])} if "timeout_s" in settings else {}
    dist.init_process_group("gloo", **bound)
    rank = dist.get_rank()
    program = workload(settings.get("workload", "W1"), settings["data"])
    torch.manual_seed(0)
    model = program.build()
    optimizer = program.optimizer(model.parameters())
    saved = Path(settings["checkpoint"]) if settings.get("checkpoint") else None
    step = 0
    if saved is not None and saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    inputs, targets = program.train
    data = TensorDataset(inputs, targets, torch.arange(len(targets)))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    hold = settings.get("hold") or {}
    with open(settings["log"], "a", buffering=1) as log, open(f"{settings['folder']}/indices", "a") as indices:
        while step < settings["steps"]:
            sampler.set_epoch(step // len(loader))  # as scripts do: an epoch that was begun begins anew
            for batch, labels, numbers in loader:
                if step == settings["steps"]:
                    break
                step += 1
                log.write(f"{time.monotonic():.6f} {rank} {step} {os.getpid()}\n")
                if (hold.get("replica"), hold.get("step")) == (rank, step):
                    _disturb(hold["point"], batch, model, step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(batch), labels).backward()
                optimizer.step()
                indices.write(f"done {os.getpid()} {step} {' '.join(map(str, numbers.tolist()))}\n")
                indices.flush()
                if saved is not None and rank == 0 and step % settings["checkpoint_every"] == 0:
                    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(content, saved)
                time.sleep(settings.get("pause_s", 0.005))
    values = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    result = {"rank": rank, "parameters": hashlib.sha256(values.numpy().tobytes()).hexdigest(), "steps": step}
    print(json.dumps(result | {"finite": bool(torch.isfinite(values).all())}), flush=True)
    dist.destroy_process_group()


def _disturb(point: str, batch: torch.Tensor, model: nn.Module, step: int) -> None:
    if point == "nan":
        batch.fill_(math.nan)
    elif point == "flip":
        flip_bit(next(model.parameters()).detach().flatten(), step)


if __name__ == "__main__":
    main()
