"""Shared memory inside a host, Gloo between hosts: two network namespaces with two ranks each."""

import subprocess
import sys
import time
from pathlib import Path

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
