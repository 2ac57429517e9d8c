"""The job's c10d store with a bound on each answer.

A client of a TCPStore waits in C++ for the answer to each request, and waits for ever where the network drops it: no
error comes, and no timeout of the store's own applies to most requests (torch 2.13). So each request is made in a
thread, and the client's connection is shut down if the time is up: that ends the wait, with the error that had to
come. A thread left in C++ would abort the process if it returned while the interpreter ends.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.core.errors import WorkerError
from paceline.core.types import Seconds

T = TypeVar("T")

# setsockopt(2), Linux 6.15: the longest time in ms after which what was not acknowledged is sent again.
TCP_RTO_MAX_MS = 44

# Longest wait for a thread to return whose connection was shut down; it takes well below a millisecond.
SHUT_DOWN_S = 1.0


def bounded(call: Callable[[], T], timeout_s: Seconds, name: str, give_up: Callable[[], None] = lambda: None) -> T:
    """Return what a call returns that may block in C++ for ever; it is left alone in its thread if the time is up.

    Args:
        call: may block.
        timeout_s: longest wait.
        name: of what is waited for, in the error.
        give_up: makes the call return once the time is up, if there is a way to.

    Raises:
        WorkerError: it did not return in time.
    """
    results: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            results.append((call(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, name=f"paceline-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not results:
        give_up()
        thread.join(SHUT_DOWN_S)
        raise WorkerError(f"{name} did not answer within {timeout_s:g} s")
    value, error = results[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class BoundedStore:
    """A c10d store each of whose answers is waited for so long: of one that is cut off there are none, and no error.

    Args:
        store: with a prefix.
        timeout_s: longest wait for one answer.
    """

    def __init__(self, store: Store, timeout_s: Seconds) -> None:
        self.store, self.timeout_s, self._given_up = store, timeout_s, False
        self._addresses = set[tuple[str, int]]()
        """Of the store's server; looked up now, since nobody may answer later."""
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
            self._addresses = {(str(address[0]), store.port) for *_, address in found}
        for connection, _ in self._connections():
            with contextlib.suppress(OSError):  # an older kernel: the answer may take as long again as the cut did
                connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)

    def get(self, key: str) -> bytes:
        return self._call(lambda: self.store.get(key))

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self.store.set(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(lambda: self.store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._call(lambda: self.store.compare_set(key, expected, desired))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        bound_s = self.timeout_s + timeout.total_seconds()
        self._call(lambda: self.store.wait(list(keys), timeout), bound_s)

    def found(self, key: str) -> Any:
        """Return the JSON value of a key, or None."""
        return json.loads(self.get(key)) if self.check([key]) else None

    def _call(self, call: Callable[[], T], timeout_s: Seconds | None = None) -> T:
        if self._given_up:
            raise WorkerError("the job's store was given up, since it had not answered")
        return bounded(call, self.timeout_s if timeout_s is None else timeout_s, "the job's store", self._shut_down)

    def _shut_down(self) -> None:
        """Shut down the connections of this process to the store's server: what waits for an answer gets an error."""
        self._given_up = True
        for connection, to_server in self._connections():
            with contextlib.suppress(OSError):
                if to_server:
                    connection.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> Iterator[tuple[socket.socket, bool]]:
        """Yield each connection of this process to the store's server, or of the server to a client, and which it is.

        What is yielded is another handle of the connection, and closed afterwards.
        """
        for name in os.listdir("/dev/fd") if self._addresses else ():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
                ends = [
                    (address[0].removeprefix("::ffff:"), address[1]) in self._addresses
                    for address in (connection.getpeername(), connection.getsockname())
                    if isinstance(address, tuple)
                ]
                if any(ends):
                    yield connection, ends[0]
