"""Reading a pickle of byte arrays, bytes, numbers, lists and dicts, and of nothing else.

A pickle is a program: it may import any name and call it. Here the few names that a pickled array needs stand for
classes of this file, every other name is refused, and not even numpy's own unpickling runs on what the file says.
"""

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError
from paceline.datasets.files import read_bytes


def read_pickle(path: Path) -> Any:
    """What the pickle holds; a numpy array in it comes back as a :class:`ByteArray`.

    Raises:
        InputError: where it asks for a name that no plain data needs (which is not run), or is damaged.
    """
    content = read_bytes(path)
    try:
        return _Restricted(io.BytesIO(content), encoding="bytes").load()
    except InputError as error:
        raise InputError(f"{path} {error}") from None
    except Exception as error:
        # Damaged opcodes raise nearly anything: IndexError, KeyError, UnicodeDecodeError, MemoryError, ...
        raise InputError(
            f"{path} is no readable pickle: {type(error).__name__}: {error}; put the original file there"
        ) from error


class ByteArray:
    """A pickled numpy array of unsigned bytes; ``value`` is the array, read-only."""

    value: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], "_DType", bool, bytes]) -> None:
        _, shape, dtype, fortran, raw = state
        self.fill(raw, dtype, shape, "F" if fortran else "C")

    def fill(self, raw: bytes, dtype: Any, shape: tuple[int, ...], order: str) -> "ByteArray":
        """Takes the values from the bytes in the file."""
        if not isinstance(dtype, _DType) or dtype.code not in ("u1", b"u1"):
            raise InputError("holds an array that is not of unsigned bytes; put the original file there")
        if not isinstance(raw, (bytes, bytearray)) or math.prod(shape) != len(raw):
            raise InputError(f"holds an array of shape {shape} without as many bytes; put the original file there")
        self.value = np.frombuffer(bytes(raw), np.uint8).reshape(shape, order="F" if order == "F" else "C")
        return self


class _DType:
    """Stands for numpy.dtype; only its code matters, for the unsigned byte has no byte order."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order, alignment and the like."""


def _reconstruct(*_: Any) -> ByteArray:
    return ByteArray()


def _frombuffer(raw: bytes, dtype: Any, shape: tuple[int, ...], order: str) -> ByteArray:
    return ByteArray().fill(raw, dtype, shape, order)


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise InputError(f"asks for the text encoding {encoding!r}; put the original file there")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): ByteArray,
    ("numpy", "dtype"): _DType,
    # Python 3 writes bytes so under protocol 2, and empty ones as a call without arguments.
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _no_bytes,
    # numpy 1 and numpy 2; _frombuffer is protocol 5's.
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise InputError(
                f"asks for {module_name}.{global_name}, which no plain array needs: it was refused and not run; "
                "put the original file there"
            )
        return _ALLOWED[module_name, global_name]
