"""Objects between two processes of one host, through a socket that both hold.

::

    small    | pickle |                                one message
    large    | - | + the descriptor of a parcel        (:mod:`paceline.comm.shipping`)
"""

import pickle
import socket
from typing import Any

from paceline.comm.nursery import MESSAGE_BYTES
from paceline.comm.shipping import SHARED_FROM_BYTES, Parcel, parts_of, ship, unpack

_IN_A_PARCEL = b"-"


def post(link: socket.socket, obj: object) -> None:
    """Send an object graph.

    Args:
        link: of kind SOCK_SEQPACKET.
        obj: what cloudpickle can carry.

    Raises:
        InputError: a part of it can't be pickled.
        OSError: nobody is there any more.
    """
    stream, *arrays = parts_of(obj)
    if not arrays and len(stream) <= SHARED_FROM_BYTES:
        link.send(stream)
        return
    parcel = ship(obj)
    try:
        socket.send_fds(link, [_IN_A_PARCEL], [parcel.fd])
    finally:
        parcel.close()


def collect(link: socket.socket) -> Any:
    """Wait for the next object graph; raises EOFError where the other side has gone."""
    message, fds, _, _ = socket.recv_fds(link, MESSAGE_BYTES, 1)
    if not message:
        raise EOFError("the other side has gone")
    if not fds:
        return pickle.loads(message)
    parcel = Parcel(fds[0])
    try:
        return unpack(parcel)
    finally:
        parcel.close()
