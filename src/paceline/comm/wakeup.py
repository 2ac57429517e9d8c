"""Wake a sleeping process of this host: eventfds, futexes, and a spin-then-sleep wakeup made of one of them.

A wakeup makes a system call only if the receiver sleeps::

    receiver                                  sender
    polls memory; yields the processor; ...   writes the data
    sets "asleep"                             fence
    fence                                     asleep?  clear it, set the event
    polls memory once more
    blocks on the event

Between a fence and what follows it no load overtakes a store, so at least one of the two sees the other's word: either
the receiver sees the data, or the sender sees that the receiver sleeps. Setting an event is a system call and wakes a
process; polling is a load. Under load no process sleeps, and nothing but loads and stores is needed.
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
from typing import Generic, NamedTuple, TypeVar

from paceline.core.types import Nanoseconds, Seconds

Token = TypeVar("Token")


class EventFd:
    """A flag in the kernel that any process with ``fileno()`` can set and wait for.

    Setting it twice is setting it once: it says that there is something to read, not how much. Clear first, read
    afterwards, and nothing is lost.

    >>> event = EventFd()
    >>> event.set(); event.set(); event.wait(0), event.clear(), event.wait(0)
    (True, None, False)
    >>> event.close()
    """

    def __init__(self, fd: int | None = None) -> None:
        """Create a new one, or take over an ``fd`` that was inherited or received."""
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if fd is None else fd
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor, to pass to another process or add to a poller; readable while set."""
        return self._fd

    def set(self) -> None:
        """Wake the process that waits, now or at its next wait."""
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:  # the counter is full, so it is set
            return

    def clear(self) -> None:
        """Forget that it was set."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:  # it was not set
            return

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until it is set, and leave it so; return False if the time is up first. None: no timeout."""
        return bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Poller(Generic[Token]):
    """Waits for any of several file descriptors: eventfds, pidfds, sockets.

    >>> event, poller = EventFd(), Poller[str]()
    >>> poller.add(event.fileno(), "report")
    >>> poller.wait(0), event.set(), poller.wait(0)
    ([], None, ['report'])
    >>> poller.close(); event.close()
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._tokens: dict[int, Token] = {}

    def add(self, fd: int, token: Token) -> None:
        """Return ``token`` from ``wait`` while ``fd`` is readable: an event set, a process ended, a message."""
        self._epoll.register(fd, select.EPOLLIN)
        self._tokens[fd] = token

    def remove(self, fd: int) -> None:
        """Poll ``fd`` no more; call this before it is closed."""
        self._epoll.unregister(fd)
        del self._tokens[fd]

    def wait(self, timeout_s: float | None) -> list[Token]:
        """Sleep until something is readable and return its tokens; none if the time is up first. None: no timeout."""
        return [self._tokens[fd] for fd, _ in self._epoll.poll(timeout_s)]

    def close(self) -> None:
        """Close it, but not the descriptors that were added; idempotent."""
        self._epoll.close()


_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _ALL_WAITERS = 0, 1, 2**31 - 1
_TIMESPEC = struct.Struct("qq")

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_char_p)
_syscall.restype = ctypes.c_long


class Futex:
    """Sleeping on the low half of a :class:`Wakeup`'s own word: a process that maps the word needs no descriptor.

    The word is 1 while its owner sleeps. A sender writes 0 before it wakes the owner, and the kernel compares the word
    with 1 before it lets a process sleep, so no wake-up falls between the two.

    Args:
        word: the wakeup's, in shared memory.
    """

    def __init__(self, word: "memoryview[int]") -> None:
        self._word = ctypes.c_uint32.from_buffer(word)  # keeps the memory mapped
        self._address = ctypes.addressof(self._word)
        self._number = _FUTEX_NUMBERS[platform.machine()]

    def set(self) -> None:
        """Wake the owner if it sleeps."""
        _syscall(self._number, self._address, _WAKE, _ALL_WAITERS, None)

    def wait(self, timeout_s: Seconds) -> bool:
        """Sleep until set; return False if the time is up first."""
        seconds = int(timeout_s)
        bound = _TIMESPEC.pack(seconds, int((timeout_s - seconds) * 1e9))
        if _syscall(self._number, self._address, _WAIT, 1, bound) == 0:
            return True
        return ctypes.get_errno() == errno.EAGAIN  # the word was 0 already

    def clear(self) -> None:
        """Do nothing: a futex has no state but the word, which the wakeup itself clears."""


class Polling(NamedTuple):
    """How a wait polls before it blocks."""

    polls: int
    """At most; with a yield in between each takes about a microsecond."""
    short_ns: Nanoseconds
    """After a wait that was this short the next one polls fully; after longer ones, half as often each time."""


SHARED_CORES = Polling(64, 300_000)
"""Others may need the core."""

OWN_CORE = Polling(2048, 2_000_000)
"""There is a core for each process: to wake one from its sleep takes longer than many a step."""

# A yield that took longer has given the core to another program.
DISPLACED_NS: Nanoseconds = 500_000

# For so long after that the core counts as shared; twice as long each time if that happens again within as long.
CONTENDED_NS: Nanoseconds = 10_000_000
MAX_CONTENDED_NS: Nanoseconds = 1_000_000_000

UNBOUNDED_NS: Nanoseconds = 2**63

# Longest time that a wait polls without yielding the processor.
MAX_BUSY_NS: Nanoseconds = 200_000

# Longest sleep without a poll: all that is lost if a sender dies between clearing the word and setting the event.
DOZE_S: Seconds = 1.0

# True where stores become visible in program order and fence is a full fence. Elsewhere every notification
# makes the system call, whose entry into the kernel orders both.
FENCED = platform.machine() in ("x86_64", "AMD64")

_barrier = threading.Lock()


def fence() -> None:
    """Let no later load overtake an earlier store: taking and releasing a lock are locked instructions on x86."""
    with _barrier:
        return


class Wakeup:
    """An event, and a word in shared memory that is 1 while its owner sleeps.

    Args:
        event: set to wake the owner.
        asleep: one 8-byte word, 0 at first; written by both sides.
        spin_ns: longest time that a wait polls before it blocks. Where other processes compute, a yield may last until
            their time slice is over; a process that sleeps instead runs as soon as it is woken.
        polling: how a wait polls before that; may change between waits.
    """

    def __init__(
        self,
        event: EventFd | Futex,
        asleep: "memoryview[int]",
        spin_ns: Nanoseconds = UNBOUNDED_NS,
        polling: Polling = SHARED_CORES,
    ) -> None:
        self.event, self._asleep, self.spin_ns, self.polling = event, asleep, spin_ns, polling
        self._polls = polling.polls
        self._contended_until = self._contended_ns = 0
        self._began: Nanoseconds = 0
        self._busy_ns: Nanoseconds = 0

    def notify(self) -> None:
        """Wake the owner if it sleeps; the data for it has been written before."""
        fence()
        self.notify_fenced()

    def notify_fenced(self) -> None:
        """Wake the owner if it sleeps; the data for it has been written, and a fence made, before."""
        if self._asleep[0] or not FENCED:
            self._asleep[0] = 0
            self.event.set()

    def expect(self, wait_ns: Nanoseconds, worked_ns: Nanoseconds) -> None:
        """Predict the next wait and the work between two; the next :meth:`spin` keeps the processor for that long.

        Not for long, nor for more than a small part of the work. A process that yields gets the processor back when
        all others have had their turn, and its caches are filled with their data.
        """
        self._busy_ns = 2 * wait_ns if 2 * wait_ns < min(MAX_BUSY_NS, worked_ns // 8) else 0

    def spin(self, ready: Callable[[], bool]) -> bool:
        """Poll for a moment, if such waits were short lately; return whether ``ready`` did.

        A core of its own that another program has taken for a while counts as shared.
        """
        self._began = began = time.monotonic_ns()
        while self._busy_ns and time.monotonic_ns() - began < self._busy_ns:
            if ready():
                return True
        last = time.monotonic_ns()
        for _ in range(min(self._polls, self._polling_at(last).polls)):
            if ready():
                return True
            os.sched_yield()
            now = time.monotonic_ns()
            if now - last > DISPLACED_NS and self.polling is not SHARED_CORES:
                self._displaced(now)
                break
            if now - began > self.spin_ns:
                break
            last = now
        return ready()

    def _displaced(self, now: Nanoseconds) -> None:
        """Note that another program has had the core."""
        again = now - self._contended_until < self._contended_ns
        self._contended_ns = min(2 * self._contended_ns, MAX_CONTENDED_NS) if again else CONTENDED_NS
        self._contended_until = now + self._contended_ns

    def _polling_at(self, now: Nanoseconds) -> Polling:
        return self.polling if now >= self._contended_until else SHARED_CORES

    def sleep(self, ready: Callable[[], bool], block: Callable[[Seconds], object], timeout_s: Seconds) -> None:
        """Block until notified; return at once if ``ready`` does. For the owner alone.

        Args:
            ready: polls memory.
            block: waits for the event, and whatever else may wake the owner, for so many seconds at most.
            timeout_s: longest sleep.
        """
        # Store, fence, load: the mirror image of a sender, see the module's drawing.
        self._asleep[0] = 1
        fence()
        if not ready():
            block(min(timeout_s, DOZE_S))
            self.event.clear()
        self._asleep[0] = 0
        now = time.monotonic_ns()
        most, short_ns = self._polling_at(now)
        short = now - self._began < short_ns
        self._polls = most if short else min(self._polls, most) // 2
