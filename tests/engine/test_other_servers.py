"""Why another server has failed is known as soon as it has said so, however much of that was read before."""

import socket
from typing import Any

import pytest

from paceline.engine.server.first_server_link import FAILED, STAGED
from paceline.engine.server.other_servers import _Link, _told

REASON = "a policy must decide by its arguments alone"


@pytest.mark.parametrize("read", ["nothing", "what comes before", "that there is a reason"])
def test_the_reason_is_read_ahead(read: str) -> None:
    own, other = socket.socketpair()
    with own, other:
        peer: Any = None
        link = _Link(peer, own, own)
        assert _told(link) is None
        other.sendall(STAGED.pack(0, 1, 2, 3))
        assert _told(link) is None
        other.sendall(STAGED.pack(FAILED, 0, len(REASON), 0))
        if read != "nothing":
            own.recv(STAGED.size)
        if read == "that there is a reason":
            *_, link.reason_bytes, _ = STAGED.unpack(own.recv(STAGED.size))
            assert _told(link) is None  # that has not come yet
        other.sendall(REASON.encode())
        other.close()
        assert _told(link) == f"it failed: {REASON}"
