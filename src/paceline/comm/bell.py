"""Doorbells: one process rings, another sleeps until it does."""

import os
import select
from typing import Generic, TypeVar

Token = TypeVar("Token")


class Bell:
    """A flag in the kernel that any process holding ``fileno()`` can raise and wait for.

    Rings add up to one: a bell says that there is something to look at, not how much. Clear first, look afterwards,
    and no ring is lost.

    >>> bell = Bell()
    >>> bell.ring(); bell.ring(); bell.wait(0), bell.clear(), bell.wait(0)
    (True, None, False)
    >>> bell.close()
    """

    def __init__(self, fd: int | None = None) -> None:
        """A new bell, or the one behind an ``fd`` that was inherited or received; closing the bell closes it."""
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if fd is None else fd
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def fileno(self) -> int:
        """What to pass to another process and to add to a Waiter; readable while the bell has been rung."""
        return self._fd

    def ring(self) -> None:
        """Wake who waits, now or at the next wait."""
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:  # the counter is full: it has been rung
            return

    def clear(self) -> None:
        """Forget the rings so far."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:  # it has not been rung
            return

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until the bell has been rung; False where it was not in time. Does not clear it. None: no bound."""
        return bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Waiter(Generic[Token]):
    """Waits for any of several file descriptors: bells, pidfds, sockets.

    >>> bell, waiter = Bell(), Waiter[str]()
    >>> waiter.add(bell.fileno(), "door")
    >>> waiter.wait(0), bell.ring(), waiter.wait(0)
    ([], None, ['door'])
    >>> waiter.close(); bell.close()
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._tokens: dict[int, Token] = {}

    def add(self, fd: int, token: Token) -> None:
        """Return ``token`` from ``wait`` while ``fd`` is readable (a bell rung, a process gone, a message, an end)."""
        self._epoll.register(fd, select.EPOLLIN)
        self._tokens[fd] = token

    def remove(self, fd: int) -> None:
        """Before ``fd`` is closed."""
        self._epoll.unregister(fd)
        del self._tokens[fd]

    def wait(self, timeout_s: float | None) -> list[Token]:
        """Sleep until something is readable; its tokens, or none where the time is up first. None: no bound."""
        return [self._tokens[fd] for fd, _ in self._epoll.poll(timeout_s)]

    def close(self) -> None:
        """Idempotent; the descriptors that were added stay open."""
        self._epoll.close()
