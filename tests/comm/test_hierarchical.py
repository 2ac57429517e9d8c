"""Shared memory inside a host, Gloo between hosts: two network namespaces with two ranks each."""

import subprocess
import sys
from pathlib import Path

from tests.namespaces import Host, two_hosts

SCRIPT = Path(__file__).with_name("hierarchical_script.py")
PORT = 29_500
"""torchrun's own; in a namespace that was made for this test nobody else has it."""


def start(host: Host, first: Host, node: int) -> "subprocess.Popen[str]":
    words = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node))
    address = ("--master-addr", first.address, "--master-port", str(PORT))
    command = host.command(sys.executable, *words, *address, SCRIPT)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=host.environment(), **pipes)  # type: ignore[call-overload, no-any-return]


def test_two_hosts_of_two_ranks() -> None:
    with two_hosts() as hosts:
        nodes = [start(host, hosts[0], number) for number, host in enumerate(hosts)]
        try:
            said = [node.communicate(timeout=100)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
    for node, text in zip(nodes, said, strict=True):
        assert node.returncode == 0, text
        assert text.count("fine") == 2, text
