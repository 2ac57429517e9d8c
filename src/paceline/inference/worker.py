"""A process that answers together with others which somebody on this host has made."""

import contextlib
import gc
import pickle
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.kernel import keep_freed_memory
from paceline.comm.shipping import Parcel, ship, unpack
from paceline.engine.failure import kind_and_text
from paceline.engine.team.meeting import BACKEND, meet
from paceline.engine.team.team import assembled
from paceline.engine.team.world import World
from paceline.inference.answer import answer
from paceline.inference.question import Answer, Question


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """The process's entry.

    Args:
        args: ``rank``, ``size``, ``threads``, and ``store``, the path of a file by which ranks meet.
        fds: the question, and a socket for the answer.
    """
    keep_freed_memory()
    question_fd, link_fd = fds
    with socket.socket(fileno=link_fd) as link:
        try:
            question: Question = unpack(Parcel(question_fd))
            torch.set_num_threads(args["threads"])
            meet(args["rank"], args["size"], args["store"], question.timeout_s)
            parcel = ship(answered(question, BACKEND))
            socket.send_fds(link, [pickle.dumps(("done",))], [parcel.fd])
        except BaseException as error:
            with contextlib.suppress(OSError):  # main has gone, or wants no more
                link.send(pickle.dumps(("failed", *kind_and_text(args["rank"], error))))
            raise SystemExit(1) from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def answered(question: Question, backend: str) -> Answer:
    """What this rank has of the output."""
    try:
        with assembled(World.found(), backend, "cpu", question.timeout_s, watched=True) as team:
            return answer(question, team)
    finally:
        gc.collect()  # a group that is let go of in the middle of another backward pass hangs (torch 2.13, Gloo)
