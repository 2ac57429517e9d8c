"""Processes that are each other's ranks: started, heard, and ended however it ends."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

SILENCE_S = 300.0
"""How long ranks may tell nothing before they are given up."""

GOING_S = 10.0
"""How long a process that was killed may take to be gone."""


class RankError(RuntimeError):
    """A rank failed, or was killed."""


@dataclass(frozen=True)
class Member:
    """One rank, as the work that it does knows it.

    Args:
        rank: which.
        ranks: of how many.
        tell: send something that can be pickled to whoever listens.
    """

    rank: int
    ranks: int
    tell: Callable[[Any], None]


Work = Callable[..., None]
"""(member, arguments …), inside a process group of all ranks on Gloo. Importable by name."""


@dataclass(frozen=True)
class _Failed:
    trace: str


class _Done:
    """A rank's last word."""


def crew(work: Work, ranks: int, *arguments: Any) -> Iterator[Any]:
    """Do the work on so many processes with one thread each, and yield what they tell, in the order of its coming.

    Raises:
        RankError: the first rank that failed, with its traceback, or was killed; all others have been ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # once, not on each rank
    with tempfile.TemporaryDirectory() as folder:
        links, processes = [], []
        try:
            for rank in range(ranks):
                mine, theirs = context.Pipe(duplex=False)
                said = (work, rank, ranks, f"{folder}/store", theirs, arguments)
                process = context.Process(target=_live, args=said, daemon=True)
                with _uninterrupted():
                    process.start()
                    processes.append(process)
                theirs.close()  # or a rank that dies would go unnoticed
                links.append(mine)
            yield from _heard(links, processes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(GOING_S)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: a process that is half started would be left behind."""
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def _heard(links: Sequence[Connection], processes: Sequence[Any]) -> Iterator[Any]:
    there = {link: rank for rank, link in enumerate(links)}
    while there:
        ready = wait(list(there), SILENCE_S)
        if not ready:
            raise RankError(f"the ranks {sorted(there.values())} reported nothing for {SILENCE_S:g} s")
        said = {there[link]: _received(link) for link in ready if isinstance(link, Connection)}
        for rank, word in said.items():  # first: those who were at work with it fail as well
            if word is None:
                raise RankError(f"rank {rank} of {len(processes)} was {_end(processes[rank])}")
        for rank, word in said.items():
            if isinstance(word, _Failed):
                raise RankError(f"rank {rank} of {len(processes)} failed:\n{word.trace}")
            if isinstance(word, _Done):
                del there[links[rank]]
            else:
                yield word


def _received(link: Connection) -> Any:
    """What was said; None where the other side has gone without its last word."""
    try:
        return link.recv()
    except (EOFError, ConnectionResetError):
        return None


def _end(process: Any) -> str:
    process.join(GOING_S)
    code = process.exitcode
    return f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"


def _live(work: Work, rank: int, ranks: int, store: str, link: Connection, arguments: Sequence[Any]) -> None:
    """The whole life of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started it
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    try:
        _work(work, Member(rank, ranks, link.send), store, arguments)
        last: Any = _Done()
    except BaseException:
        last = _Failed(traceback.format_exc())
    link.send(last)
    sys.stdout.flush()
    # Going on to the destructors of Gloo, a rank once aborted under torch 2.13.
    os._exit(isinstance(last, _Failed))


def _work(work: Work, member: Member, store: str, arguments: Sequence[Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=FileStore(store, member.ranks), rank=member.rank, world_size=member.ranks,
        timeout=timedelta(seconds=SILENCE_S),
    )  # fmt: skip
    work(member, *arguments)
    dist.barrier()  # all have done their part before anyone's sockets close


def _leave_with_parent() -> None:
    """A rank whose owner was killed would go on alone."""
    owner = multiprocessing.parent_process()
    assert owner is not None, "this runs in a crew"
    owner.join()
    os._exit(1)
