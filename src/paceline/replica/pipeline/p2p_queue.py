"""Ordered messages of one worker of a pipeline: all are posted in the one order that both sides know.

Each message has a rank, its place in the order of an ideal run (:mod:`~paceline.replica.pipeline.comm_plan`). Before a
worker waits, for a message or for one of its own to be received, it posts the receives of all of lower rank.

The shape of a value is sent once. The first time that input of new shapes comes along, each value is preceded by a
header of fixed size::

    | kind | dtype | differentiable | dims | order | scalar's bits | dim 0 | dim 1 | ... | dim 7 |     int64

A value arrives with its dims in memory in the order that they had where it was computed: a graph has no
``contiguous()`` where the tensor was so already, and what follows may be a view that no other order has.
"""

import heapq
import struct
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.replica.capture.input_spec import Shapes
from paceline.replica.tensor.placements import memory_order
from paceline.schedule.base import LETTERS


class P2P(ABC):
    """Non-blocking messages of one worker to and from the others of its replica.

    Messages from one worker to another are sent and awaited in one order, which both derive from the schedule; so they
    carry no tags.
    """

    @abstractmethod
    def isend(self, tensor: Tensor, destination: int, description: str) -> None:
        """Begin to send; the tensor must stay as it is until :meth:`wait_sends`.

        Args:
            tensor: contiguous.
            destination: a worker of the same replica.
            description: the message in words that follow "waited for".
        """

    @abstractmethod
    def irecv(self, shape: Sequence[int], dtype: torch.dtype, source: int, description: str) -> Callable[[], Tensor]:
        """Post a receive; returns a function that waits for the tensor."""

    @abstractmethod
    def wait_sends(self, newest: int = 0) -> None:
        """Wait until all sends have completed, except for the ``newest`` ones."""

    def reached(self, description: str) -> None:
        """Wait until this worker's device has done what it was given; on the CPU it has.

        So a worker that never sends a message is noticed before a number is read that depends on it.
        """
        del description


class StageReplicaGroup(ABC):
    """The replicas of one stage, as one of them sees them; each holds the same part of A.

    They take turns: each runs its own micro-batches. So each has a term of every gradient, of the loss and of the
    statistics of a mini-batch, and all of them are summed.

    Args:
        first: whether this is the one with the first micro-batch: it has some even if a batch is too small for all.
    """

    def __init__(self, *, first: bool) -> None:
        self.first = first

    @abstractmethod
    def all_reduce(self, vector: Tensor, description: str) -> None:
        """Replace a vector by its sum over all replicas, which call this together.

        Args:
            vector: of the same length on all of them.
            description: the sum in words that follow "waited for".
        """


Scalar: TypeAlias = int | float | bool
# A value that crosses from one part to another.
Value: TypeAlias = Tensor | Scalar

MAX_DIMS = 8
HEADER_LENGTH = 6 + MAX_DIMS

_SCALARS: tuple[type, ...] = (bool, int, float)
_TENSOR = len(_SCALARS)
_DTYPES: tuple[torch.dtype, ...] = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


def sent_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the order of the dims in which a tensor is sent: as they are in memory, unless one is expanded."""
    expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(range(tensor.dim())) if expanded else tuple(memory_order(tensor))


def as_sent(tensor: Tensor) -> Tensor:
    """Return a copy with the strides with which a tensor arrives at another worker; its gradients go back."""
    order = sent_order(tensor)
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(_inverse(order))


def _as_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor that is in memory as it is sent: contiguous, and its signs no marks of torch (conj, imag)."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Dtype and shape of a tensor, or a scalar itself.

    Args:
        dtype: None: it is a scalar.
        order: the dims as they are in memory; later values of the same shape are sent in the order of the first.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    differentiable: bool
    scalar: Scalar | None = None
    order: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, name: str, value: object, *, differentiable: bool) -> "TensorHeader":
        """Return the header of a value.

        Raises:
            InputError: it is neither a tensor that can be sent nor a number.
        """
        if type(value) in _SCALARS:
            return cls(None, (), False, value)  # type: ignore[arg-type]
        if not isinstance(value, Tensor):
            fault, rule = f"is a {type(value).__name__}", "neither a tensor nor a number"
        elif value.dtype not in _DTYPES or value.dim() > MAX_DIMS or value.layout != torch.strided:
            fault = f"has {value.dtype}, {value.layout}, {value.dim()} dims"
            rule = f"but only strided tensors of at most {MAX_DIMS} dims and plain dtypes"
        else:
            return cls(value.dtype, tuple(value.shape), differentiable, order=sent_order(value))
        raise InputError(
            f"{name} crosses from one stage to another and {fault}: {rule} can be sent; write stages=1 or cuts= so "
            "that it stays within a stage"
        )

    def pack(self) -> Tensor:
        """Return the header as it is sent.

        >>> TensorHeader.unpack(TensorHeader(torch.int64, (3, 2), False, order=(1, 0)).pack())
        TensorHeader(dtype=torch.int64, shape=(3, 2), differentiable=False, scalar=None, order=(1, 0))
        >>> TensorHeader.unpack(TensorHeader(None, (), False, 0.1).pack()).scalar
        0.1
        """
        kind = _TENSOR if self.dtype is not None else _SCALARS.index(type(self.scalar))
        dtype = _DTYPES.index(self.dtype) if self.dtype is not None else 0
        if isinstance(self.scalar, float):  # its bits, so that it arrives exactly
            (bits,) = struct.unpack("<q", struct.pack("<d", self.scalar))
        else:
            bits = int(self.scalar or 0)
        dims = [*self.shape, *[0] * (MAX_DIMS - len(self.shape))]
        order = sum(dim * MAX_DIMS**place for place, dim in enumerate(self.order))
        return torch.tensor([kind, dtype, self.differentiable, len(self.shape), order, bits, *dims])

    @classmethod
    def unpack(cls, packed: Tensor) -> "TensorHeader":
        """Return the header that was packed."""
        kind, dtype, differentiable, dims, order, bits, *shape = packed.tolist()
        if kind == _TENSOR:
            places = tuple(order // MAX_DIMS**place % MAX_DIMS for place in range(dims))
            return cls(_DTYPES[dtype], tuple(shape[:dims]), bool(differentiable), order=places)
        if _SCALARS[kind] is float:
            (bits,) = struct.unpack("<d", struct.pack("<q", bits))
        return cls(None, (), False, _SCALARS[kind](bits))

    def __str__(self) -> str:
        if self.dtype is None:
            return repr(self.scalar)
        return f"{self.dtype}{list(self.shape)}{' with gradient' if self.differentiable else ''}"


@dataclass(frozen=True, slots=True)
class P2PMessage:
    """A value on its way from the part that computes it to one that reads it, or its gradient on the way back.

    Args:
        rank: its place in the order of all messages.
        name: name of the crossing.
        source: the part that computes the value.
        consumer: the part that reads it.
        sender: a worker.
        receiver: a worker, maybe the same one: then nothing is sent.
    """

    rank: int
    name: str
    source: int
    consumer: int
    micro_batch: int
    gradient: bool
    sender: int
    receiver: int

    @property
    def description(self) -> str:
        """The message in words that follow "waited for"."""
        start, end = (self.consumer, self.source) if self.gradient else (self.source, self.consumer)
        prefix, letter = ("the gradient of ", LETTERS["backward"]) if self.gradient else ("", LETTERS["forward"])
        return (
            f"{prefix}{self.name} of micro-batch {self.micro_batch}, from stage {start} for stage {end} "
            f"({end}{letter}{self.micro_batch})"
        )


# (crossing, consumer, the value's sender, its receiver, shapes of the micro-batch's input): one header for each.
HeaderKey: TypeAlias = tuple[str, int, int, int, Shapes]


class Received(NamedTuple):
    """A value, and whether its sender waits for its gradient."""

    value: Value
    differentiable: bool


class P2PQueue:
    """Sends and receives one worker's messages: mini-batch after mini-batch, or of a stream of micro-batches.

    Args:
        p2p: to and from the other workers; None: there are none.
        stream_rounds: p, where nothing calls :meth:`wait_sends` between mini-batches. What was sent is then released p
            rounds later, a round being a forward and a backward pass: by then the other side has come to its receipt,
            be it the first worker and a gradient sent straight from the last. ``isend`` must not wait there: the other
            side may not have been given the micro-batch yet.
    """

    def __init__(self, p2p: P2P | None, *, stream_rounds: int | None = None) -> None:
        self._p2p, self._stream_rounds = p2p, stream_rounds
        self._headers: dict[HeaderKey, TensorHeader] = {}
        self.begin((), ())

    def begin(self, incoming: Iterable[P2PMessage], shapes: Sequence[Shapes]) -> None:
        """Begin a mini-batch, or a stream.

        Args:
            incoming: all that other workers will send; of a stream, none as yet.
            shapes: of each micro-batch.
        """
        self._incoming: list[tuple[int, P2PMessage]] = []  # a heap, by rank
        self._unknown: dict[int, list[P2PMessage]] = defaultdict(list)
        self._shapes = dict(enumerate(shapes))  # the headers that were received for these shapes stay valid
        self._receives: dict[int, Callable[[], Tensor]] = {}
        self._local: dict[int, Received] = {}
        self._sent: dict[tuple[int, bool], int] = {}
        self.announce(incoming)

    def announce(self, incoming: Iterable[P2PMessage]) -> None:
        """Other workers will send these; receives of a micro-batch are posted only once it has been given."""
        for message in incoming:
            if message.micro_batch in self._shapes:
                heapq.heappush(self._incoming, (message.rank, message))
            else:
                self._unknown[message.micro_batch].append(message)

    def add_micro_batch(self, index: int, shapes: Shapes) -> None:
        """Let receives of a stream's micro-batch be posted."""
        self._shapes[index] = shapes
        self.announce(self._unknown.pop(index, ()))

    def drop_micro_batch(self, index: int) -> None:
        """Nothing more is sent or received of it."""
        self._shapes.pop(index, None)
        self._unknown.pop(index, None)

    def post_receives(self, rank: int, *, wait: bool = True) -> None:
        """Post the receives of all messages up to ``rank``.

        Args:
            rank: of a message.
            wait: whether to wait for headers; else stop where one is missing.
        """
        while self._incoming and self._incoming[0][0] <= rank:
            message, p2p = self._incoming[0][1], self._p2p
            assert p2p is not None, "other workers send nothing where there are none"
            key = self._key(message)
            if key not in self._headers:
                if not wait:
                    return
                assert not message.gradient, "the header of a value arrives before its gradient is due"
                description = f"the shape of {message.description}"
                packed = p2p.irecv([HEADER_LENGTH], torch.int64, message.sender, description)()
                self._headers[key] = TensorHeader.unpack(packed)
            heapq.heappop(self._incoming)  # only now: the message stays first if its header is missing
            # A scalar came with its header, and values without a gradient get none back: no message follows.
            header = self._headers[key]
            if header.dtype is not None and (header.differentiable or not message.gradient):
                shape = header.shape if message.gradient else [header.shape[dim] for dim in header.order]
                receive = p2p.irecv(shape, header.dtype, message.sender, message.description)
                self._receives[message.rank] = receive

    def send(self, message: P2PMessage, value: Value, *, differentiable: bool) -> int:
        """Begin to send a value, preceded by its header if that is new; returns its bytes.

        Raises:
            InputError: the value can't be sent, or for input of the same shapes it was another one.
        """
        if message.sender == message.receiver:  # for another part of this worker
            self._local[message.rank] = Received(value, differentiable)
            return 0
        # The send may block until it is received: the receives of lower rank have to be posted first.
        self.post_receives(message.rank)
        header, key = TensorHeader.of(message.name, value, differentiable=differentiable), self._key(message)
        first = self._headers.setdefault(key, header)
        if first is header:
            self._isend(message, header.pack(), f"the shape of {message.description}")
        elif first != header:
            raise InputError(
                f"stage {message.source}, micro-batch {message.micro_batch}: {message.name}, which crosses to stage "
                f"{message.consumer}, is {header}, but for input of the same shapes it was {first}; what crosses may "
                "depend on the input's shapes alone. Write stages=1, or cuts= so that it stays within a stage"
            )
        if not isinstance(value, Tensor):
            return 0
        self._isend(message, _as_numbers(value.permute(first.order)), message.description)
        return value.nbytes

    def send_gradient(self, message: P2PMessage, gradient: Tensor) -> int:
        """Begin to send the gradient of a value that was received; returns its bytes."""
        if message.sender == message.receiver:
            self._local[message.rank] = Received(gradient, False)
            return 0
        self.post_receives(message.rank)
        self._isend(message, _as_numbers(gradient), message.description)
        return gradient.nbytes

    def receive(self, message: P2PMessage) -> Received:
        """Return a value or a gradient once it has arrived."""
        if message.sender == message.receiver:
            return self._local.pop(message.rank)
        self.post_receives(message.rank)
        header, pending = self._headers[self._key(message)], self._receives.pop(message.rank, None)
        if pending is not None:
            tensor = pending()
            if not message.gradient and header.order != tuple(range(len(header.order))):
                # Detached, it is no view of which a function of autograd may not return the value.
                tensor = tensor.permute(_inverse(header.order)).detach()
            return Received(tensor, header.differentiable)
        assert header.scalar is not None, "a gradient that is not sent is not waited for"
        return Received(header.scalar, False)

    def wait_sends(self) -> None:
        """Wait until all sends have completed."""
        if self._p2p is not None:
            self._p2p.wait_sends()

    def reached(self) -> None:
        """Wait until this worker's device has done what it was given; on the CPU it has."""
        if self._p2p is not None:
            self._p2p.reached("the messages of this step")

    def _isend(self, message: P2PMessage, tensor: Tensor, description: str) -> None:
        assert self._p2p is not None, f"{description} is for worker {message.receiver}, and there is but one"
        if self._stream_rounds is not None:
            # Count the sends of each of the newest 2p passes, and release those of older ones.
            pass_of = message.micro_batch, message.gradient
            if pass_of not in self._sent:
                while len(self._sent) >= 2 * self._stream_rounds:
                    del self._sent[next(iter(self._sent))]
                self._p2p.wait_sends(newest=sum(self._sent.values()))
                self._sent[pass_of] = 0
            self._sent[pass_of] += 1
        self._p2p.isend(tensor, message.receiver, description)

    def _key(self, message: P2PMessage) -> HeaderKey:
        ends = (message.receiver, message.sender) if message.gradient else (message.sender, message.receiver)
        return message.name, message.consumer, *ends, self._shapes[message.micro_batch]
