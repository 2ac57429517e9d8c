"""What another server has told is known as soon as it has come, however much of it was read before."""

import socket
from typing import Any

import pytest

from paceline.engine.server.first_server_link import FAILED, STAGED
from paceline.engine.server.other_servers import _Link

REASON = "a policy must decide by its arguments alone"
TOLD = STAGED.pack(0, 1, 2, 3) + STAGED.pack(FAILED, 0, len(REASON), 0) + REASON.encode()


@pytest.mark.parametrize("cut", range(len(TOLD) + 1))
def test_the_reason_is_known_as_soon_as_it_has_come(cut: int) -> None:
    own, other = socket.socketpair()
    with own, other:
        own.setblocking(False)
        peer: Any = None
        link = _Link(peer, own, own)
        link.read()
        other.sendall(TOLD[:cut])
        link.read()
        assert link.staged == ({0: (1, 2)} if cut >= STAGED.size else {})
        assert link.failure == (f"it failed: {REASON}" if cut == len(TOLD) else None)
        other.sendall(TOLD[cut:])
        other.close()
        with pytest.raises(EOFError, match="the other end has closed"):
            link.read()
        assert (link.staged, link.taken, link.failure) == ({0: (1, 2)}, 3, f"it failed: {REASON}")
