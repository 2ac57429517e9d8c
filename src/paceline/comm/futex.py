"""Sleeping on a word of shared memory: who maps the word can wake, and needs no file descriptor for it."""

import ctypes
import errno
import platform
import struct

from paceline.core.types import Seconds

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1
_TIMESPEC = struct.Struct("qq")

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_char_p)
_syscall.restype = ctypes.c_long


class Futex:
    """Where the owner of an :class:`~paceline.comm.alarm.Alarm` sleeps: the low half of the alarm's own word.

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
