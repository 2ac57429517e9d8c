"""IDX, the format of MNIST and the sets made after it (yann.lecun.com/exdb/mnist).

::

    byte   0  1  2     3           4 .. 4+4n-1        then
           0  0  0x08  n           n sizes            the unsigned bytes, last axis fastest
                 |     dimensions  big-endian uint32
                 unsigned byte
"""

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError
from paceline.datasets.files import read_bytes

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
