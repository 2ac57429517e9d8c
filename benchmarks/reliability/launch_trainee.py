"""One rank of a job that was started wrongly: ``launch_trainee.py SYSTEM KIND``; rank 1 is the one that differs.

Prints a line when it arrives, with the time, and one with what it was told; exit code 0 if it trained to the end.
"""

import functools
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import paceline

SYSTEM, KIND = sys.argv[1:]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ODD = RANK == 1
# How long ranks wait for each other: less than the time in which all have to end, by what it takes to import torch.
TIMEOUT_S = 5.0


class Net(nn.Module):
    """Two layers; of the odd rank with the names the other way round, of another shape, or of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        width = 5 if is_odd("shape") else 4
        layers = {"first": nn.Linear(6, width), "second": nn.Linear(width, 6)}
        for name in reversed(layers) if is_odd("order") else layers:
            self.add_module(name, layers[name])
        self.to(torch.float32 if is_odd("dtype") else torch.float64)
        self.power = 3 if is_odd("model") else 2

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.get_submodule("first")(x.to(next(self.parameters()).dtype)) ** self.power
        return self.get_submodule("second")(hidden)  # type: ignore[no-any-return]


def is_odd(kind: str) -> bool:
    return ODD and kind == KIND


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2 if is_odd("data") else 1)
    return torch.randn(64, 6, generator=generator), torch.randint(6, (64,), generator=generator)


def optimizer() -> Any:
    if is_odd("optimizer"):
        return functools.partial(torch.optim.Adam, lr=0.1)
    return functools.partial(torch.optim.SGD, lr=0.2 if is_odd("rate") else 0.1)


def run_paceline() -> None:
    if is_odd("torch"):
        torch.__version__ = "1.0"  # type: ignore[assignment]
    if is_odd("paceline"):
        paceline.__version__ = "0.0"
    program = paceline.Program(
        model=Net,
        loss=smoothed if is_odd("loss") else loss,
        optimizer=optimizer(),
        train=data(),
        seed=1 if is_odd("seed") else 0,
        batch_size=8 if is_odd("batch") else 4,
        clip_norm=1.0 if is_odd("clip") else None,
    )
    strategy = f"stages={SIZE}" if is_odd("strategy") else f"replicas={SIZE}"
    paceline.train(program, strategy, engine="distributed", steps=4, timeout_s=TIMEOUT_S, progress=False)


def run_ddp() -> None:
    """The same job as a plain script has it; what has no counterpart there is left as it is."""
    from datetime import timedelta

    torch.manual_seed(1 if is_odd("seed") else 0)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    model = nn.parallel.DistributedDataParallel(Net())
    step, (inputs, targets) = optimizer()(model.parameters()), data()
    batch = 8 if is_odd("batch") else 4
    for start in range(0, 4 * batch, batch):
        step.zero_grad()
        own = smoothed if is_odd("loss") else loss
        own(model(inputs[start : start + batch]), targets[start : start + batch]).backward()
        if is_odd("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.step()
    torch.distributed.destroy_process_group()


def main() -> None:
    print("arrived", time.monotonic(), flush=True)
    try:
        run_paceline() if SYSTEM == "paceline" else run_ddp()
    except Exception as error:
        print("told", f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
