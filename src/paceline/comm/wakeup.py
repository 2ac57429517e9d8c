"""Sleep until another process wakes this one: eventfds, futexes, and a spin-then-sleep wakeup made of them.

Sleeping on a word of shared memory: who maps the word can wake, and needs no file descriptor for it.

Waking who sleeps, and nobody else: a bell that is rung only where somebody waits for it.

::

    who waits                                 who wakes
    looks; yields the processor; looks ...    writes what there is to see
    sets "asleep"                             fence
    fence                                     asleep?  clear it, ring the bell
    looks once more
    blocks on the bell

Between a fence and what follows it no load overtakes a store, so at least one of the two sees the other's word: either
the sleeper sees what was written, or the writer sees the sleeper. Ringing is a system call and wakes a process; looking
is a load. While there is much to do nobody sleeps, and nothing but loads and stores is needed.
"""

import ctypes
import errno
import os
import platform
import select
import struct
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from paceline.core.types import Nanoseconds, Seconds

Token = TypeVar("Token")


class EventFd:
    """A flag in the kernel that any process holding ``fileno()`` can raise and wait for.

    Rings add up to one: a bell says that there is something to look at, not how much. Clear first, look afterwards,
    and no ring is lost.

    >>> bell = EventFd()
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


class Poller(Generic[Token]):
    """Waits for any of several file descriptors: bells, pidfds, sockets.

    >>> bell, waiter = EventFd(), Poller[str]()
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


_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1
_TIMESPEC = struct.Struct("qq")

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_char_p)
_syscall.restype = ctypes.c_long


class Futex:
    """Where the owner of an :class:`~paceline.comm.wakeup.Wakeup` sleeps: the low half of the alarm's own word.

    The word is 1 while its owner sleeps. Whoever wakes it writes 0 first, so the kernel lets nobody fall asleep after
    that, and no ring is lost.

    Args:
        word: the alarm's, in shared memory.
    """

    def __init__(self, word: "memoryview[int]") -> None:
        self._word = ctypes.c_uint32.from_buffer(word)  # keeps the memory mapped
        self._address = ctypes.addressof(self._word)
        self._number = _NUMBERS[platform.machine()]

    def ring(self) -> None:
        """Wake whoever sleeps."""
        _syscall(self._number, self._address, _WAKE, _EVERYBODY, None)

    def wait(self, timeout_s: Seconds) -> bool:
        """Sleep while the word is 1, for so long at the most; whether somebody woke this process."""
        seconds = int(timeout_s)
        bound = _TIMESPEC.pack(seconds, int((timeout_s - seconds) * 1e9))
        if _syscall(self._number, self._address, _WAIT, 1, bound) == 0:
            return True
        return ctypes.get_errno() == errno.EAGAIN  # it was 0 already

    def clear(self) -> None:
        """Nothing: a ring leaves nothing behind but the word, which the alarm itself clears."""


MOST_LOOKS = 64
"""Looks before a wait blocks, at most; with a yield in between each takes about a microsecond."""

SHORT_NS: Nanoseconds = 300_000
"""A wait that was over so soon is looked for the next time; after longer ones, less and less."""

UNBOUNDED_NS: Nanoseconds = 2**63

MOST_HELD_NS: Nanoseconds = 200_000
"""Nobody looks for longer without yielding the processor."""

DOZE_S: Seconds = 1.0
"""Nobody sleeps longer without looking: no more is lost if a ringer dies between clearing the word and ringing."""

FENCED = platform.machine() in ("x86_64", "AMD64")
"""Whether stores become visible in the order they are made in, and :func:`fence` is one. Elsewhere every ring rings."""

_barrier = threading.Lock()


def fence() -> None:
    """Let no later load overtake an earlier store: a lock is taken and released by locked instructions."""
    with _barrier:
        return


class Ringing(Protocol):
    """What wakes a sleeper: a :class:`~paceline.comm.wakeup.EventFd`, a :class:`~paceline.comm.wakeup.Futex`."""

    def ring(self) -> None:
        """Wake who sleeps."""

    def clear(self) -> None:
        """Forget the rings so far."""

    def wait(self, timeout_s: Seconds) -> bool:
        """Sleep until rung; False where it was not in time."""


class Wakeup:
    """A bell, and a word in shared memory that says whether its owner sleeps.

    Args:
        bell: rung to wake the owner.
        asleep: one 8-byte word, 0 at first; written by both sides.
        look_ns: how long a wait looks before it blocks, at most. Where others compute, a yield may last until their
            turn is over; who sleeps instead is run when it is woken.
    """

    def __init__(self, bell: Ringing, asleep: "memoryview[int]", look_ns: Nanoseconds = UNBOUNDED_NS) -> None:
        self.bell, self._asleep, self.look_ns = bell, asleep, look_ns
        self._looks = MOST_LOOKS
        self._began: Nanoseconds = 0
        self._hold_ns: Nanoseconds = 0

    def ring(self) -> None:
        """Wake the owner if it sleeps; what it is to see has been written before."""
        fence()
        self.wake()

    def wake(self) -> None:
        """As :meth:`ring`, by who has made a fence since the writing."""
        if self._asleep[0] or not FENCED:
            self._asleep[0] = 0
            self.bell.ring()

    def expect(self, wait_ns: Nanoseconds, worked_ns: Nanoseconds) -> None:
        """Say how long a wait lasts, and the work between two; the next :meth:`spin` holds the processor for it.

        Not for long, nor for more than a small part of the work. Who yields instead gets the processor back when all
        others have had their turn, and finds its caches filled with their data.
        """
        self._hold_ns = 2 * wait_ns if 2 * wait_ns < min(MOST_HELD_NS, worked_ns // 8) else 0

    def spin(self, ready: Callable[[], bool]) -> bool:
        """Look for a moment, if such a wait has lately been short; whether there was something to see."""
        self._began = began = time.monotonic_ns()
        while self._hold_ns and time.monotonic_ns() - began < self._hold_ns:
            if ready():
                return True
        for _ in range(self._looks):
            if ready():
                return True
            os.sched_yield()
            if time.monotonic_ns() - began > self.look_ns:
                break
        return ready()

    def sleep(self, ready: Callable[[], bool], block: Callable[[Seconds], object], timeout_s: Seconds) -> None:
        """Block until rung or, without blocking, until there is something to see; for the owner alone.

        Args:
            ready: whether there is something to see.
            block: waits for the bell, and whatever else may wake the owner, for so long at the most.
            timeout_s: the longest sleep.
        """
        self._asleep[0] = 1
        fence()
        if not ready():
            block(min(timeout_s, DOZE_S))
            self.bell.clear()
        self._asleep[0] = 0
        short = time.monotonic_ns() - self._began < SHORT_NS
        self._looks = MOST_LOOKS if short else self._looks // 2
