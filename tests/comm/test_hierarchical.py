"""Shared memory inside a host, Gloo between hosts: two network namespaces with two ranks each."""

import subprocess
import sys
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.comm.hierarchical import ChainedWork
from tests.namespaces import Host, two_hosts

SCRIPT = Path(__file__).with_name("hierarchical_script.py")
PORT = 29_500
"""torchrun's own; in a namespace that was made for this test nobody else has it."""


def start(host: Host, first: Host, node: int, said: Path) -> "subprocess.Popen[bytes]":
    words = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node))
    address = ("--master-addr", first.address, "--master-port", str(PORT))
    command = host.command(sys.executable, *words, *address, SCRIPT)
    with said.open("wb") as out:
        return subprocess.Popen(command, env=host.environment(), stdout=out, stderr=subprocess.STDOUT)


def test_two_hosts_of_two_ranks(tmp_path: Path) -> None:
    said = [tmp_path / f"host {number}" for number in range(2)]
    with two_hosts() as hosts:
        nodes = [start(host, hosts[0], number, said[number]) for number, host in enumerate(hosts)]
        try:
            deadline = time.monotonic() + 100
            codes = [node.wait(max(deadline - time.monotonic(), 0.1)) for node in nodes]
        except subprocess.TimeoutExpired:
            codes = []  # where one host has failed the other waits for it
        finally:
            for node in nodes:
                node.kill()
    texts = [file.read_text() for file in said]
    assert codes == [0, 0], "\n".join(texts)
    assert [text.count("fine") for text in texts] == [2, 2], "\n".join(texts)


# ------------------------------------------------------------------------------------------------ calls of several legs


class Leg(dist.Work):
    """Ends, well or not, while a wait for it times out."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.error, self.ended = error, False

    def wait(self, timeout: Any = None) -> bool:
        if timeout is not None and not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.ended


def chained(*legs: dist.Work) -> ChainedWork:
    return ChainedWork(deque(), iter(legs), ())


def test_a_leg_that_ends_as_the_time_is_up_has_ended_well() -> None:
    work = chained(Leg(), Leg())
    assert work.wait(timedelta(seconds=1))
    assert work.is_success()


def test_or_not_and_then_its_own_error_is_raised() -> None:
    work = chained(Leg("Connection closed by peer"), Leg())
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        work.wait(timedelta(seconds=1))
    assert not work.is_success()
