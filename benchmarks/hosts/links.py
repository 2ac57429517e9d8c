"""What the links themselves carry: raw sockets in a ring, and the all-reduce of Gloo (one process on each host)."""

import argparse
import os
import socket
import threading
import time

import torch
import torch.distributed as dist

PORT = 9000
CHUNK_BYTES = 1 << 20


def ring(rank: int, addresses: list[str], seconds: float) -> float:
    """Send to the next host and receive from the one before; return the bytes that came in a second."""
    with socket.create_server((addresses[rank], PORT)) as listening:
        following = addresses[(rank + 1) % len(addresses)]
        sending = _connected(following)
        receiving, _ = listening.accept()
        end = time.monotonic() + seconds
        thread = threading.Thread(target=_send, args=(sending, end))
        thread.start()
        count, began, buffer = 0, time.monotonic(), bytearray(CHUNK_BYTES)
        while got := receiving.recv_into(buffer):
            count += got
        rate = count / (time.monotonic() - began)
        thread.join()
        return rate


def all_reduce(rank: int, addresses: list[str], seconds: float, parameters: int) -> float:
    """Return the gradients a second that synchronous training by Gloo's all-reduce applies, in lockstep."""
    os.environ |= {"MASTER_ADDR": addresses[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=len(addresses))
    a, delta, goes_on = torch.zeros(parameters), torch.full((parameters,), 1e-6), torch.ones(1)
    dist.all_reduce(delta)
    began, count = time.monotonic(), 0
    while goes_on.item():
        dist.all_reduce(delta)
        a.add_(delta, alpha=-0.01 / len(addresses))
        count += len(addresses)
        goes_on.fill_(time.monotonic() - began < seconds)
        dist.broadcast(goes_on, 0)
    rate = count / (time.monotonic() - began)
    dist.destroy_process_group()
    return rate


def _connected(address: str) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, PORT), 1.0)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)  # it does not listen yet, and would say so to nobody


def _send(connection: socket.socket, end: float) -> None:
    chunk = bytes(CHUNK_BYTES)
    with connection:
        connection.settimeout(None)
        while time.monotonic() < end:
            connection.sendall(chunk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("ring", "gloo"))
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--addresses", nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--parameters", type=int, default=0)
    said = parser.parse_args()
    common = said.rank, said.addresses, said.seconds
    print(ring(*common) if said.what == "ring" else all_reduce(*common, said.parameters))


if __name__ == "__main__":
    main()
