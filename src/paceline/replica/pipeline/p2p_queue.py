"""What a value is apart from its elements: told once by whoever makes it, and known from then on.

The first time that input of new shapes comes along, each value is preceded by a header of fixed size::

    | kind | dtype | differentiable | dims | scalar's bits | dim 0 | dim 1 | ... | dim 7 |     int64

One worker's letters: what it sends, what it expects, and what it only hands to another part of its own.
"""

import heapq
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.replica.pipeline.base import P2P, Arrival
from paceline.replica.pipeline.comm_plan import Message
from paceline.replica.pipeline.micro_batches import Shapes

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
class TensorHeader:
    """Of a tensor, or a scalar itself."""

    dtype: torch.dtype | None
    """None: it is a scalar."""
    shape: tuple[int, ...]
    differentiable: bool
    scalar: Scalar | None = None

    def pack(self) -> Tensor:
        """As it travels.

        >>> TensorHeader.unpack(TensorHeader(torch.int64, (3, 2), False).pack())
        Header(dtype=torch.int64, shape=(3, 2), differentiable=False, scalar=None)
        >>> TensorHeader.unpack(TensorHeader(None, (), False, 0.1).pack()).scalar
        0.1
        """
        kind = _TENSOR if self.dtype is not None else _SCALARS.index(type(self.scalar))
        dtype = _DTYPES.index(self.dtype) if self.dtype is not None else 0
        dims = [*self.shape, *[0] * (_DIMS - len(self.shape))]
        return torch.tensor([kind, dtype, self.differentiable, len(self.shape), _bits(self.scalar), *dims])

    @classmethod
    def unpack(cls, packed: Tensor) -> "TensorHeader":
        """From what has arrived."""
        kind, dtype, differentiable, dims, bits, *shape = packed.tolist()
        if kind != _TENSOR:
            return cls(None, (), False, _scalar(_SCALARS[kind], bits))
        return cls(_DTYPES[dtype], tuple(shape[:dims]), bool(differentiable))

    def __str__(self) -> str:
        if self.dtype is None:
            return repr(self.scalar)
        return f"{self.dtype}{list(self.shape)}{' with gradient' if self.differentiable else ''}"


def describe(name: str, value: object, *, differentiable: bool) -> TensorHeader:
    """The header of a value.

    Raises:
        InputError: it is neither a tensor that can be sent nor a number.
    """
    if type(value) in _SCALARS:
        return TensorHeader(None, (), False, value)  # type: ignore[arg-type]
    if not isinstance(value, Tensor):
        raise _unsendable(name, f"is a {type(value).__name__}", "neither a tensor nor a number")
    if value.dtype not in _DTYPES or value.dim() > _DIMS or value.layout != torch.strided:
        kind = f"{value.dtype}, {value.layout}, {value.dim()} dims"
        raise _unsendable(name, f"has {kind}", f"but only strided tensors of at most {_DIMS} dims and plain dtypes")
    return TensorHeader(value.dtype, tuple(value.shape), differentiable)


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


Edge: TypeAlias = tuple[str, int, tuple[int, int], Shapes]
"""(crossing, consumer, between whom, shapes of the micro-batch's input): what a header is known by."""


class Received(NamedTuple):
    """A value, and whether its maker waits for its gradient."""

    value: Value
    differentiable: bool


class P2PQueue:
    """One worker's: mini-batch after mini-batch, or a stream of micro-batches that goes on.

    Args:
        wire: to the other workers.
        rounds: p, where nobody calls :meth:`settle` between mini-batches. What was sent is then let go of p rounds
            later, a round being a forward and a backward pass: by then the other side has come to its receipt, be it
            the first worker and a gradient come straight from the last. The wire's ``send`` must not wait there: the
            other side may not have been given the micro-batch yet.
    """

    def __init__(self, wire: P2P, *, rounds: int | None = None) -> None:
        self._wire, self._rounds = wire, rounds
        self._headers: dict[Edge, TensorHeader] = {}
        self.begin((), ())

    def begin(self, incoming: Iterable[Message], shapes: Sequence[Shapes]) -> None:
        """A mini-batch begins, or a stream.

        Args:
            incoming: all that other workers will send; of a stream, none as yet.
            shapes: of each micro-batch.
        """
        self._incoming: list[tuple[int, Message]] = []
        self._early: dict[int, list[Message]] = defaultdict(list)
        self._shapes = dict(enumerate(shapes))
        self._arrivals: dict[int, Arrival] = {}
        self._own: dict[int, Received] = {}
        self._sent: dict[tuple[int, bool], int] = {}
        self.announce(incoming)

    def announce(self, incoming: Iterable[Message]) -> None:
        """Other workers will send these; those of a micro-batch that isn't there yet are not expected before it is."""
        for message in incoming:
            if message.micro_batch in self._shapes:
                heapq.heappush(self._incoming, (message.rank, message))
            else:
                self._early[message.micro_batch].append(message)

    def give(self, micro_batch: int, shapes: Shapes) -> None:
        """A micro-batch is there."""
        self._shapes[micro_batch] = shapes
        self.announce(self._early.pop(micro_batch, ()))

    def forget(self, micro_batch: int) -> None:
        """Nothing more is sent or expected of it."""
        self._shapes.pop(micro_batch, None)
        self._early.pop(micro_batch, None)

    def look_ahead(self, rank: int) -> None:
        """Expect what stands in line up to ``rank`` already, as far as that can be done without waiting."""
        while self._next_rank() <= rank and self._edge(self._incoming[0][1]) in self._headers:
            self._post()

    def send(self, message: Message, value: Value, *, differentiable: bool) -> int:
        """Begin to send a value, preceded by its header if that is new; returns bytes."""
        if message.sender == message.receiver:
            self._own[message.rank] = Received(value, differentiable)
            return 0
        self._expect(message.rank)
        self._tell(message, describe(message.name, value, differentiable=differentiable))
        return self._begin(message, value) if isinstance(value, Tensor) else 0

    def send_back(self, message: Message, gradient: Tensor) -> int:
        """Begin to send a gradient; returns bytes."""
        if message.sender == message.receiver:
            self._own[message.rank] = Received(gradient, False)
            return 0
        self._expect(message.rank)
        return self._begin(message, gradient)

    def take(self, message: Message) -> Received:
        """A value or a gradient, once it is there."""
        if message.sender == message.receiver:
            return self._own.pop(message.rank)
        self._expect(message.rank)
        header, arrival = self._headers[self._edge(message)], self._arrivals.pop(message.rank, None)
        if arrival is not None:
            return Received(arrival.take(), header.differentiable)
        assert header.scalar is not None, "a gradient that nobody sends is not waited for"
        return Received(header.scalar, False)

    def settle(self) -> None:
        """Wait until all that was sent has gone."""
        self._wire.settle()

    def _send(self, message: Message, tensor: Tensor, what: str) -> None:
        if self._rounds is not None:
            self._count(message, self._rounds)
        self._wire.send(tensor, message.receiver, what)

    def _count(self, message: Message, rounds: int) -> None:
        """Among what each of the newest passes has sent; what older ones have sent is let go of."""
        of_pass = message.micro_batch, message.gradient
        if of_pass not in self._sent:
            while len(self._sent) >= 2 * rounds:
                del self._sent[next(iter(self._sent))]
            self._wire.settle(but=sum(self._sent.values()))
            self._sent[of_pass] = 0
        self._sent[of_pass] += 1

    def _begin(self, message: Message, tensor: Tensor) -> int:
        self._send(message, tensor.contiguous(), message.what)
        return tensor.nbytes

    def _tell(self, message: Message, header: TensorHeader) -> None:
        edge = self._edge(message)
        known = self._headers.setdefault(edge, header)
        if known is header:
            self._send(message, header.pack(), f"the shape of {message.what}")
        elif known != header:
            raise _changed(message, known, header)

    def _next_rank(self) -> float:
        return self._incoming[0][0] if self._incoming else float("inf")

    def _expect(self, rank: int) -> None:
        """Expect all that stands in line up to ``rank``."""
        while self._next_rank() <= rank:
            self._post()

    def _post(self) -> None:
        """Expect the next in line, once it is known what it is."""
        message = self._incoming[0][1]
        edge = self._edge(message)
        if edge not in self._headers:
            assert not message.gradient, "the header of a value is known before its gradient is due"
            what = f"the shape of {message.what}"
            self._headers[edge] = TensorHeader.unpack(
                self._wire.expect([LENGTH], torch.int64, message.sender, what).take()
            )
        heapq.heappop(self._incoming)
        header = self._headers[edge]
        if header.dtype is not None and (header.differentiable or not message.gradient):
            self._arrivals[message.rank] = self._wire.expect(header.shape, header.dtype, message.sender, message.what)

    def _edge(self, message: Message) -> Edge:
        return message.name, message.consumer, message.between, self._shapes[message.micro_batch]


def _changed(message: Message, known: TensorHeader, header: TensorHeader) -> InputError:
    return InputError(
        f"stage {message.source}, micro-batch {message.micro_batch}: {message.name}, which crosses to stage "
        f"{message.consumer}, is {header}, but for input of the same shapes it was {known}; what crosses may depend on "
        "the input's shapes alone. Write stages=1, or cuts= so that it stays within a stage"
    )
