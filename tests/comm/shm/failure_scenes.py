"""Scenes in which something goes wrong: each rank says what it was told of it, and when."""

import functools
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from paceline.comm.shm import rendezvous
from paceline.core.errors import PacelineError


def told(call: Callable[[], object]) -> str:
    """What a call that must fail says."""
    try:
        call()
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def differ(rank: int, size: int, how: str) -> tuple[str, str]:
    """Ranks that call different things, after a call that went well; what the next call in the group says too."""
    x = torch.ones(8)
    dist.all_reduce(x)
    calls: dict[str, Callable[[], object]] = {
        "size": lambda: dist.all_reduce(torch.ones(10 + rank)),
        "far apart": lambda: dist.all_reduce(torch.ones(10 if rank else 3_000_000)),
        "dtype": lambda: dist.broadcast(torch.ones(6, dtype=torch.float64 if rank else torch.float32), 0),
        "call": lambda: dist.all_reduce(x) if rank else dist.broadcast(x, 0),
        "root": lambda: dist.broadcast(x, rank),
        "rule": lambda: dist.all_reduce(x, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        "parts": lambda: dist.reduce_scatter(
            torch.ones(3), [torch.ones(3 if other == rank else 4) for other in range(size)]
        ),
        "pairs": lambda: dist.all_to_all(
            [torch.empty(3 + rank) for _ in range(size)], [torch.ones(3) for _ in range(size)]
        ),
    }
    return told(calls[how]), told(lambda: dist.all_reduce(x))


def message_differs(rank: int, size: int) -> str:
    """The receiver notices; the sender, which had ended its call, is told in its next one, and so is the third."""
    if rank == 0:
        dist.send(torch.ones(5), 1)
    if rank == 1:
        return told(lambda: dist.recv(torch.ones(6), 0))
    return told(dist.barrier)


def dies(rank: int, size: int, during: str) -> tuple[str, float]:
    """Rank 1 is killed; what the others are told, and how long after that."""
    word = torch.zeros(1, dtype=torch.float64)
    if rank == 1:
        word[0] = time.monotonic() + 0.3  # dies then
        threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGKILL)).start()
    dist.broadcast(word, 1)
    x = torch.ones(4_000_000)

    def large() -> None:
        while True:
            dist.all_reduce(x)

    def idle() -> None:
        if rank == 1:
            threading.Event().wait(60)
        dist.barrier()

    def message() -> None:
        if rank == 1:
            threading.Event().wait(60)
        if rank == 0:
            while True:
                dist.send(x, 1)  # until the channel is full
        dist.recv(x, 1)

    said = told({"large": large, "idle": idle, "message": message}[during])
    return said, time.monotonic() - word.item()


def leaves(rank: int, size: int) -> str:
    """Rank 1 ends in peace after its last call, which the others may still be in; then they call once more."""
    x = torch.ones(100)
    dist.all_reduce(x)
    if rank == 1:
        os._exit(0)
    assert x[0].item() == size
    return told(dist.barrier)


def stops(rank: int, size: int) -> str:
    """Rank 1 is suspended until the others have given up; they call once it is."""
    pids = torch.zeros(size, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    if rank == 1:
        signal.raise_signal(signal.SIGSTOP)
        return told(lambda: dist.all_reduce(torch.ones(3)))
    suspended = psutil.Process(int(pids[1]))
    while suspended.status() != psutil.STATUS_STOPPED:
        os.sched_yield()
    said = told(lambda: dist.all_reduce(torch.ones(3)))
    suspended.send_signal(signal.SIGCONT)
    return said


def alone(rank: int, size: int) -> str:
    """A receive that nobody answers, in a group of a shorter patience."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    said = told(lambda: dist.recv(torch.ones(3), 0, group=group)) if rank == 1 else ""
    dist.barrier()
    return said


def interrupted(rank: int, size: int) -> str:
    """Ctrl-C while a rank waits."""
    if rank == 0:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            dist.recv(torch.ones(3), 1)
        except KeyboardInterrupt:
            dist.barrier()
            return "interrupted"
    dist.barrier()
    return "went on"


def refusals(rank: int, size: int) -> list[str]:
    """What can't be carried; afterwards the group is as good as before."""
    x = torch.ones(4)
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(3, device="meta")),
        lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(x, dist.ReduceOp.BAND),
        lambda: dist.all_reduce(x.to(torch.float8_e4m3fn)),
        lambda: dist.all_to_all_single(torch.empty(4), x, [1, 1], [1, 3]),
        lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(3)] * size),
    ]
    said = [told(call) for call in calls]
    dist.all_reduce(x)
    assert x.tolist() == [size] * 4
    return said


def elsewhere(rank: int, size: int, what: str) -> str:
    """A second group whose ranks believe to be apart."""
    if what == "host" and rank == 1:
        rendezvous.host_id = lambda: "another"  # type: ignore[assignment]
    if what == "process" and rank == 1:
        real = rendezvous.address_of
        rendezvous.address_of = lambda segment: rendezvous.SegmentAddress(  # type: ignore[assignment]
            os.getppid(), 0, real(segment).size_bytes, real(segment).token
        )
    return told(lambda: dist.new_group(timeout=timedelta(seconds=5)))


def absent(rank: int, size: int, folder: str) -> str:
    """A group that one of its ranks never joins."""
    from paceline.comm.shm.rendezvous import rendezvous

    if rank == 1:
        dist.barrier()
        return ""
    store = dist.FileStore(str(Path(folder) / "absent"), 2)
    said = told(lambda: rendezvous(store, "new", 0, [0, 1], 0.5))
    dist.barrier()
    return said


def memory(rank: int, size: int) -> dict[str, Any]:
    """What a rank maps while a group lives, and after it has been destroyed."""
    x = torch.ones(1_000_000)
    dist.all_reduce(x)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    during = _maps("paceline:group")
    dist.destroy_process_group()
    return {"during": during, "after": _maps("paceline:group"), "named": os.listdir("/dev/shm")}


def _maps(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


def after_the_end(rank: int, size: int) -> str:
    """A call in a group that has been destroyed."""
    group = dist.new_group()
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    try:
        group.allreduce([torch.ones(3)]).wait()
    except PacelineError as error:
        return str(error)
    return "nothing"


def slices(rank: int, size: int) -> str:
    """A wait in slices: the first ones are too short, which spoils nothing and keeps nothing."""
    gc.disable()
    x = torch.ones(3)
    if rank == 1:
        dist.recv(torch.empty(1), 0)  # rank 0 has waited in vain
        dist.all_reduce(x)
        return "came"
    work = dist.all_reduce(x, async_op=True)
    said = told(functools.partial(work.wait, timedelta(seconds=0.05)))
    dist.send(torch.ones(1), 1)
    work.wait()
    assert x.tolist() == [2.0] * 3
    sent = weakref.ref(x)
    del work, x
    assert sent() is None, "what was sent is kept until garbage is collected"
    return said
