"""One worker's letters: what it sends, what it expects, and what it only hands to another part of its own."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.replica.pipeline.header import LENGTH, Header, Value, describe
from paceline.replica.pipeline.messages import Message
from paceline.replica.pipeline.micro_batches import Shapes
from paceline.replica.pipeline.wire import Arrival, Wire

Edge: TypeAlias = tuple[str, int, tuple[int, int], Shapes]
"""(crossing, consumer, between whom, shapes of the micro-batch's input): what a header is known by."""


class Received(NamedTuple):
    """A value, and whether its maker waits for its gradient."""

    value: Value
    differentiable: bool


class Mail:
    """One worker's: mini-batch after mini-batch, or a stream of micro-batches that goes on.

    Args:
        wire: to the other workers.
        rounds: p, where nobody calls :meth:`settle` between mini-batches. What was sent is then let go of p rounds
            later, a round being a forward and a backward pass: by then the other side has come to its receipt, be it
            the first worker and a gradient come straight from the last. The wire's ``send`` must not wait there: the
            other side may not have been given the micro-batch yet.
    """

    def __init__(self, wire: Wire, *, rounds: int | None = None) -> None:
        self._wire, self._rounds = wire, rounds
        self._headers: dict[Edge, Header] = {}
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

    def _tell(self, message: Message, header: Header) -> None:
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
            self._headers[edge] = Header.unpack(self._wire.expect([LENGTH], torch.int64, message.sender, what).take())
        heapq.heappop(self._incoming)
        header = self._headers[edge]
        if header.dtype is not None and (header.differentiable or not message.gradient):
            self._arrivals[message.rank] = self._wire.expect(header.shape, header.dtype, message.sender, message.what)

    def _edge(self, message: Message) -> Edge:
        return message.name, message.consumer, message.between, self._shapes[message.micro_batch]


def _changed(message: Message, known: Header, header: Header) -> InputError:
    return InputError(
        f"stage {message.source}, micro-batch {message.micro_batch}: {message.name}, which crosses to stage "
        f"{message.consumer}, is {header}, but for input of the same shapes it was {known}; what crosses may depend on "
        "the input's shapes alone. Write stages=1, or cuts= so that it stays within a stage"
    )
