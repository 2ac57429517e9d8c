"""What forked children do with tensors, and a data set of its own kind."""

from pathlib import Path

import numpy as np
import torch
from comm_entries import Args, reply

from paceline.comm.shared_memory import Arena, SharedMemory
from paceline.comm.shared_pickle import SharedObject, unpack


def add_one(args: Args, fds: list[int]) -> None:
    """Adds 1 to a tensor in shared memory."""
    segment = SharedMemory(fds[0], args["size_bytes"])
    arena = Arena()
    arena.add("first", (5,), torch.uint8)
    arena.add("second", (2, 3), torch.float64)
    arena.tensor(segment, "second").add_(1)


def receive(args: Args, fds: list[int]) -> None:
    """Unpacks a parcel, reads all of it, says what it is in memory, then writes into it."""
    parcel = SharedObject(fds[1])
    content = unpack(parcel)
    parcel.close()
    total = float(content["x"].sum() + content["a"].sum())
    before = _parcel_pages()
    content["x"].fill_(7.0)
    content["a"][:] = 7.0
    reply(fds[0], {"total": total, "before": before, "after": _parcel_pages(), "f": content["f"](2)})


def _parcel_pages() -> dict[str, int]:
    """kB of the parcel's mapping, by kind, from /proc/self/smaps."""
    lines = Path("/proc/self/smaps").read_text().split("memfd:paceline:shared-object")[1].splitlines()[1:20]
    fields = (line.split() for line in lines)
    return {f[0].rstrip(":"): int(f[1]) for f in fields if f[0] in ("Rss:", "Anonymous:")}


class Squares(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A data set of its own kind, over a numpy array."""

    def __init__(self, rows: int) -> None:
        self.data = np.arange(rows * 8.0).reshape(rows, 8) ** 2

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.data[i]), i % 10
