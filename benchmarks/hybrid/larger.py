"""A model that is larger than any worker's memory, trained by workers that have room for their parts of it.

    python benchmarks/hybrid/larger.py --layers 16 --width 4096 --strategy "stages=8" --limit-mib 900

Every worker enters a memory group (cgroup) of its own before it does anything, and the kernel kills whoever fills more
than the limit: under ``--strategy "replicas=2"``, where each worker has all of the model, it does. Needs the right to
make such groups.
"""

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline.comm.linux import FIRST, ROOT, SECOND, limited

MIB = 1 << 20


class Group:
    """A memory group with a limit.

    Args:
        name: of it.
        limit_bytes: what its processes may fill.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        said = Path("/proc/self/cgroup").read_text()
        parent, self._names = next((f, names) for f, names in limited(said, ROOT) if (f / names["limit"]).exists())
        self.folder = parent / name
        self.folder.mkdir()
        (self.folder / self._names["limit"]).write_text(str(limit_bytes))

    @property
    def most_bytes(self) -> int:
        """What its processes have filled at the most."""
        names = {FIRST["limit"]: "memory.max_usage_in_bytes", SECOND["limit"]: "memory.peak"}
        return int((self.folder / names[self._names["limit"]]).read_text())

    def close(self) -> None:
        """Remove it; its processes have ended."""
        self.folder.rmdir()


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Eight samples; a worker that unpacks them enters the first group that is empty.

    Args:
        width: of a sample.
        folders: of the groups.
    """

    def __init__(self, width: int, folders: list[Path]) -> None:
        self._inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(1))
        self._folders = folders

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], torch.tensor(index % 4)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for folder in self._folders:
            with contextlib.suppress(FileExistsError):
                (folder.parent / f"{folder.name}-taken").mkdir()  # one process alone can make it
                (folder / "cgroup.procs").write_text(str(os.getpid()))
                return


def model(layers: int, width: int) -> nn.Module:
    """So many square layers, each followed by a ReLU."""
    blocks = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Linear(width, 4))


def program(layers: int, width: int, folders: list[Path]) -> paceline.Program:
    """All eight samples in each step."""
    return paceline.Program(
        model=functools.partial(model, layers, width),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        train=Samples(width, folders),
        global_batch_size=8,
    )


@contextlib.contextmanager
def groups(count: int, limit_bytes: int) -> Iterator[list[Group]]:
    """One for each worker."""
    with contextlib.ExitStack() as closing:
        made = list[Group]()
        for index in range(count):
            made.append(Group(f"paceline-{os.getpid()}-{index}", limit_bytes))
            closing.callback(made[-1].close)
            taken = made[-1].folder.parent / f"{made[-1].folder.name}-taken"
            closing.callback(lambda taken=taken: taken.exists() and taken.rmdir())
        yield made


def main(options: argparse.Namespace) -> int:
    """Train, and say what it took."""
    workers = paceline.Strategy.parse(options.strategy).workers
    model_bytes = 4 * (options.layers * (options.width + 1) * options.width + 4 * (options.width + 1))
    print(f"a model of {model_bytes / MIB:.0f} MiB, workers limited to {options.limit_mib} MiB, {options.strategy}")
    with groups(workers, options.limit_mib * MIB) as made:
        began, ended = time.monotonic(), "trained"
        job = program(options.layers, options.width, [group.folder for group in made])
        try:
            run = paceline.train(job, options.strategy, steps=options.steps, evaluate_every=options.steps)
            print(f"train loss {run.history[0].train_loss:.6f}, then {run.summary['train_loss']:.6f}")
        except paceline.PacelineError as error:
            ended = str(error).partition("\n")[0]
        peaks = [round(group.most_bytes / MIB) for group in made]
        print(f"{ended}; {time.monotonic() - began:.0f} s; the most memory of each worker, MiB: {peaks}")
    return ended != "trained"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--strategy", default="stages=8")
    parser.add_argument("--limit-mib", type=int, default=900)
    parser.add_argument("--steps", type=int, default=2)
    sys.exit(main(parser.parse_args()))
