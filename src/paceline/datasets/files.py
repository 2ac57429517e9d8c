"""Find and read the standard files of data sets: IDX, and pickles of arrays and nothing else.

IDX, the format of MNIST and the sets made after it (yann.lecun.com/exdb/mnist).

::

    byte   0  1  2     3           4 .. 4+4n-1        then
           0  0  0x08  n           n sizes            the unsigned bytes, last axis fastest
                 |     dimensions  big-endian uint32
                 unsigned byte

Reading a pickle of byte arrays, bytes, numbers, lists and dicts, and of nothing else.

A pickle is a program: it may import any name and call it. Here the few names that a pickled array needs stand for
classes of this file, every other name is refused, and not even numpy's own unpickling runs on what the file says.
"""

import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"


def find_files(program: str, data: Path | None, names: Sequence[str], folders: Sequence[str]) -> list[Path]:
    """The paths of ``names``, each plain or with ``.gz``, all from one folder.

    Args:
        program: who asks, for the message.
        data: the folder that the user gave.
        names: the files that must be there.
        folders: below ``data``, in the order in which they are tried; "." is ``data`` itself. The first that holds any
            of the files is the one: two sets may use the same names, and must not be mixed.

    Raises:
        InputError: naming every missing file and where it was looked for.
    """
    if data is None:
        raise InputError(
            f"{program} is read from files; write --data DIR (in Python data=Path('DIR')), where DIR holds "
            f"{_listing(names)}{_below(folders)}"
        )
    data = data.expanduser()
    if not data.is_dir():
        raise InputError(f"data={str(data)!r} is no folder; write --data DIR, the folder with {_listing(names)}")
    found = [[_plain_or_gz(data / folder / name) for name in names] for folder in folders]
    best = next((paths for paths in found if any(paths)), None)
    if best is None:
        raise InputError(
            f"{program} needs {_listing(names)}, and none is in {_places(data, folders)}; "
            "write --data DIR, the folder that holds them"
        )
    return _complete(program, names, best)


def no_files(program: str, data: Path | None) -> None:
    """Raises InputError where ``data`` was given to a program that reads no files."""
    if data is not None:
        raise InputError(f"{program} reads no files, so data={str(data)!r} would do nothing; leave it out")


def read_bytes(path: Path) -> bytes:
    """What the file holds, unpacked where its first bytes say that it is gzip's.

    Raises:
        InputError: where it can't be read or unpacked.
    """
    try:
        packed = path.read_bytes()
        return gzip.decompress(packed) if packed.startswith(_GZIP_MAGIC) else packed
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path} can't be read: {error or type(error).__name__}; put the original file there"
        ) from error


def _complete(program: str, names: Sequence[str], paths: Sequence[Path | None]) -> list[Path]:
    present = [path for path in paths if path is not None]
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    if missing:
        raise InputError(
            f"{program} also needs {_listing(missing)} in {present[0].parent}, beside {present[0].name}; put it there"
        )
    return present


def _plain_or_gz(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)


def _listing(names: Sequence[str]) -> str:
    return f"{', '.join(names)} (.gz or not)"


def _below(folders: Sequence[str]) -> str:
    return "".join(f" or {folder}/ with them" for folder in folders if folder != ".")


def _places(data: Path, folders: Sequence[str]) -> str:
    return " or ".join(str(data / folder) for folder in folders)


_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, item: tuple[int, ...]) -> NDArray[np.uint8]:
    """The samples of one IDX file, [n, *item], read-only.

    Args:
        path: the file, packed by gzip or not.
        item: the shape of one sample: (28, 28) for images, () for labels.

    Raises:
        InputError: where it is no IDX file of unsigned bytes with samples of this shape, or is empty, too short or too
            long.
    """
    content = read_bytes(path)
    shape = _shape(path, content, 1 + len(item))
    if shape[1:] != item:
        raise InputError(f"{path} holds samples of shape {shape[1:]}, not {item}; put the original file there")
    if shape[0] == 0:
        raise InputError(f"{path} holds no samples; put the original file there")
    header, size = 4 + 4 * len(shape), math.prod(shape)
    if len(content) != header + size:
        state = "truncated" if len(content) < header + size else "too long"
        raise InputError(
            f"{path} is {state}: its header says {shape}, so {header} + {size} bytes, but it has {len(content)}; "
            "put the original file there"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _shape(path: Path, content: bytes, dims: int) -> tuple[int, ...]:
    if len(content) < 4 + 4 * dims:
        raise InputError(
            f"{path} is truncated: {len(content)} bytes, fewer than an IDX header of {4 + 4 * dims}; "
            "put the original file there"
        )
    magic = int.from_bytes(content[:4], "big")
    expected = _UNSIGNED_BYTE << 8 | dims
    if magic != expected:
        raise InputError(
            f"{path} begins with 0x{magic:08x}, but an IDX file of unsigned bytes with {dims} "
            f"dimension{'s' * (dims > 1)} begins with 0x{expected:08x}; put the original file there"
        )
    return struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])


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
