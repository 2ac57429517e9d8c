"""A process that answers together with others which somebody on this host has made."""

import contextlib
import gc
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.kernel import keep_freed_memory
from paceline.comm.letters import Inbox, Outbox
from paceline.comm.shipping import Parcel, unpack
from paceline.core.errors import PacelineError
from paceline.engine.failure import kind_and_text
from paceline.engine.team.crew import Work
from paceline.engine.team.meeting import BACKEND, meet
from paceline.engine.team.team import assembled
from paceline.engine.team.world import World


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """The process's entry.

    Args:
        args: ``rank``, ``size``, ``threads``, and ``store``, the path of a file by which ranks meet.
        fds: the work, and a socket for questions and answers.
    """
    keep_freed_memory()
    work_fd, link_fd = fds
    with socket.socket(fileno=link_fd) as link:
        try:
            work: Work = unpack(Parcel(work_fd))
            torch.set_num_threads(args["threads"])
            meet(args["rank"], args["size"], args["store"], work.timeout_s)
            _answer(work, link)
        except BaseException as error:
            with contextlib.suppress(PacelineError):  # there is no memory left to say it
                Outbox().post(("failed", *kind_and_text(args["rank"], error)), [link])
            raise SystemExit(1) from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _answer(work: Work, link: socket.socket) -> None:
    """All that is asked, until nobody asks any more."""
    try:
        with assembled(World.found(), BACKEND, "cpu", work.timeout_s, watched=True) as team:
            answering = work.begin(team)
            inbox, outbox = Inbox(link), Outbox()
            while True:
                try:
                    question = inbox.collect()
                except (EOFError, ConnectionResetError):
                    return
                outbox.post(("done", answering(question)), [link])
    finally:
        gc.collect()  # a group that is let go of in the middle of another backward pass hangs (torch 2.13, Gloo)
