"""A wire between two network namespaces that this process carries packet by packet, and can disturb.

::

    namespace 0, 10.77.0.1 -- tun --> this process: flip, repeat, cut, delay --> tun -- 10.77.0.2, namespace 1

The hosts' TCP is the kernel's own, so what it repairs by itself is repaired. Needs root, and Linux.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "wire0"

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 1, 0x1000, 0x40000000
_TCP, _RST, _ACK = 6, 0x04, 0x10
# Packets with so much payload carry tensors, not what ranks say to the store.
_DATA_BYTES = 1000


@dataclass
class Wire:
    """The wire, while it is carried.

    Args:
        namespaces: names of the two.
        flips: bits still to be flipped, each in a packet of its own that carries tensors.
        mended: whether TCP's sum is made to fit the flipped bit, as where memory of a host or switch flipped it.
        repeated: whether each packet is carried twice.
        cut: whether the next packet with tensors ends its connection.
        delay_s: of each packet.
    """

    namespaces: tuple[str, str]
    flips: int = 0
    mended: bool = False
    repeated: bool = False
    cut: bool = False
    delay_s: float = 0.0
    flipped: int = field(default=0, init=False)
    packets: int = field(default=0, init=False)
    _draw: random.Random = field(default_factory=lambda: random.Random(29), init=False)
    _ends: list[int] = field(default_factory=list[int], init=False)
    _queue: list[tuple[float, int, bytes]] = field(default_factory=list[tuple[float, int, bytes]], init=False)
    _closed: bool = field(default=False, init=False)

    def carry(self) -> None:
        """Carry packets until the wire is closed."""
        while not self._closed:
            due = self._queue[0][0] - time.monotonic() if self._queue else 0.1
            ready, _, _ = select.select(self._ends, [], [], max(0.0, min(due, 0.1)))
            for end in ready:
                packet = bytearray(os.read(end, 1 << 16))
                other = self._ends[1 - self._ends.index(end)]
                self.packets += 1
                for each, target in self._disturbed(packet, end, other):
                    if self.delay_s:
                        self._queue.append((time.monotonic() + self.delay_s, target, each))
                    else:
                        self._write(target, each)
            while self._queue and self._queue[0][0] <= time.monotonic():
                _, target, each = self._queue.pop(0)
                self._write(target, each)

    def _disturbed(self, packet: bytearray, end: int, other: int) -> Iterator[tuple[bytes, int]]:
        """Yield what becomes of a packet, and where it goes."""
        start = _payload(packet)
        if start is not None and len(packet) - start >= _DATA_BYTES:
            if self.cut:
                self.cut = False
                yield _reset(packet, back=False), other
                yield _reset(packet, back=True), end
                return
            # Of a hundred packets one, so that steps with and without a flip take turns.
            if self.flips and self._draw.random() < 0.01:
                self.flips -= 1
                self.flipped += 1
                packet[self._draw.randrange(start, len(packet))] ^= 1 << self._draw.randrange(8)
                if self.mended:
                    _mend(packet)
        yield bytes(packet), other
        if self.repeated:
            yield bytes(packet), other

    def _write(self, end: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # its interface goes down with the namespace
            os.write(end, packet)

    def limit(self, rate: str) -> None:
        """Limit both directions, to ``10mbit`` for instance."""
        for namespace in self.namespaces:
            words = f"tc qdisc add dev {INTERFACE} root tbf rate {rate} burst 64kb latency 400ms"
            _ip("netns", "exec", namespace, *words.split())


@contextlib.contextmanager
def wire() -> Iterator[Wire]:
    """Context manager: two namespaces and the wire between them; both go with the block."""
    key = uuid.uuid4().hex[:8]
    carried = Wire((f"wire-{key}-0", f"wire-{key}-1"))
    thread = threading.Thread(target=carried.carry, daemon=True)
    try:
        for namespace, address in zip(carried.namespaces, ADDRESSES, strict=True):
            _ip("netns", "add", namespace)
            carried._ends.append(_end(namespace))
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                _ip("-n", namespace, "link", "set", interface, "up")
        thread.start()
        yield carried
    finally:
        carried._closed = True
        if thread.ident is not None:
            thread.join()
        for end in carried._ends:
            os.close(end)
        for namespace in carried.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=20, check=False)


def _end(namespace: str) -> int:
    """Return the file of a new interface in a namespace."""
    opened: list[int] = []

    def open_there() -> None:  # in a thread of its own, which alone enters the namespace
        with Path(f"/run/netns/{namespace}").open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                return
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
        opened.append(fd)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    if not opened:
        raise RuntimeError("no interface can be made in a network namespace here; run this as root on Linux")
    return opened[0]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def _payload(packet: bytearray) -> int | None:
    """Return where the payload of a TCP packet begins; None: it is no TCP over IPv4."""
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != _TCP:
        return None
    header = (packet[0] & 15) * 4
    return header + (packet[header + 12] >> 4) * 4


def _mend(packet: bytearray) -> None:
    """Write the sum that TCP's receiver will compute."""
    header = (packet[0] & 15) * 4
    packet[header + 16 : header + 18] = b"\0\0"
    segment = bytes(packet[header:])
    pseudo = bytes(packet[12:20]) + struct.pack("!HH", _TCP, len(segment))
    padded = pseudo + segment + b"\0" * (len(segment) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    packet[header + 16 : header + 18] = struct.pack("!H", total ^ 0xFFFF)


def _reset(packet: bytearray, *, back: bool) -> bytes:
    """Return a packet that ends a connection, as if this one's sender, or with ``back`` its receiver, sent it."""
    header = (packet[0] & 15) * 4
    source, target, sequence, acknowledged = struct.unpack("!HHII", packet[header : header + 12])
    addresses = bytes(packet[12:20])
    if back:
        source, target, sequence, acknowledged = target, source, acknowledged, sequence
        addresses = addresses[4:] + addresses[:4]
    segment = struct.pack("!HHIIBBHHH", source, target, sequence, acknowledged, 5 << 4, _RST | _ACK, 0, 0, 0)
    made = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 64, _TCP, 0) + addresses + segment)
    total = sum(struct.unpack("!10H", made[:20]))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    made[10:12] = struct.pack("!H", total ^ 0xFFFF)
    _mend(made)
    return bytes(made)
