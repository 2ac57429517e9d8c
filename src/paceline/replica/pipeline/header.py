"""What a value is apart from its elements: told once by whoever makes it, and known from then on.

The first time that input of new shapes comes along, each value is preceded by a header of fixed size::

    | kind | dtype | differentiable | dims | scalar's bits | dim 0 | dim 1 | ... | dim 7 |     int64
"""

import struct
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.core.errors import InputError

Scalar: TypeAlias = int | float | bool
Value: TypeAlias = Tensor | Scalar
"""What crosses from one part to another."""

_DIMS = 8
LENGTH = 5 + _DIMS
"""Elements of a packed header."""

_SCALARS: tuple[type, ...] = (bool, int, float)
_TENSOR = len(_SCALARS)
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True, slots=True)
class Header:
    """Of a tensor, or a scalar itself."""

    dtype: torch.dtype | None
    """None: it is a scalar."""
    shape: tuple[int, ...]
    differentiable: bool
    scalar: Scalar | None = None

    def pack(self) -> Tensor:
        """As it travels.

        >>> Header.unpack(Header(torch.int64, (3, 2), False).pack())
        Header(dtype=torch.int64, shape=(3, 2), differentiable=False, scalar=None)
        >>> Header.unpack(Header(None, (), False, 0.1).pack()).scalar
        0.1
        """
        kind = _TENSOR if self.dtype is not None else _SCALARS.index(type(self.scalar))
        dtype = _DTYPES.index(self.dtype) if self.dtype is not None else 0
        dims = [*self.shape, *[0] * (_DIMS - len(self.shape))]
        return torch.tensor([kind, dtype, self.differentiable, len(self.shape), _bits(self.scalar), *dims])

    @classmethod
    def unpack(cls, packed: Tensor) -> "Header":
        """From what has arrived."""
        kind, dtype, differentiable, dims, bits, *shape = packed.tolist()
        if kind != _TENSOR:
            return cls(None, (), False, _scalar(_SCALARS[kind], bits))
        return cls(_DTYPES[dtype], tuple(shape[:dims]), bool(differentiable))

    def __str__(self) -> str:
        if self.dtype is None:
            return repr(self.scalar)
        return f"{self.dtype}{list(self.shape)}{' with gradient' if self.differentiable else ''}"


def describe(name: str, value: object, *, differentiable: bool) -> Header:
    """The header of a value.

    Raises:
        InputError: it is neither a tensor that can be sent nor a number.
    """
    if type(value) in _SCALARS:
        return Header(None, (), False, value)  # type: ignore[arg-type]
    if not isinstance(value, Tensor):
        raise _unsendable(name, f"is a {type(value).__name__}", "neither a tensor nor a number")
    if value.dtype not in _DTYPES or value.dim() > _DIMS or value.layout != torch.strided:
        kind = f"{value.dtype}, {value.layout}, {value.dim()} dims"
        raise _unsendable(name, f"has {kind}", f"but only strided tensors of at most {_DIMS} dims and plain dtypes")
    return Header(value.dtype, tuple(value.shape), differentiable)


def _unsendable(name: str, what: str, rule: str) -> InputError:
    return InputError(
        f"{name} crosses from one stage to another and {what}: {rule} can be sent; write stages=1 or cuts= so that it "
        "stays within a stage"
    )


def _bits(scalar: Scalar | None) -> int:
    if isinstance(scalar, float):
        return int(struct.unpack("<q", struct.pack("<d", scalar))[0])
    return int(scalar or 0)


def _scalar(kind: type, bits: int) -> Scalar:
    return struct.unpack("<d", struct.pack("<q", bits))[0] if kind is float else kind(bits)  # type: ignore[no-any-return]
