"""The autograd nodes through which values enter a part, and from which their gradients are sent while backward goes on.

::

    source of the value                                            consumer, maybe several stages on
    part ==> output   ----------- value ----------->   | portal ==> part ==> ...
    part <== output   <--------- gradient ----------   | portal <== part <== ...
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.replica.pipeline.p2p_queue import P2PMessage

# Begins to send a gradient; returns its bytes.
SendGradient: TypeAlias = Callable[[P2PMessage, Tensor], int]

# A sequence number that autograd prefers to all that it gives itself.
FIRST = 2**62


class _Portal(torch.autograd.Function):
    """A value in a list is none of the function's inputs, so the output is the value itself and no view of it."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, portals: "InputPortals", name: str, value: list[Tensor]) -> Tensor:
        ctx.portals, ctx.name = portals, name
        return value[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.portals.send(ctx.name, gradients[0])
        return None, None, None, None


class InputPortals:
    """The autograd nodes through which one micro-batch's differentiable values enter a part.

    Each sends its gradient once it is final, but to one worker in the order of the messages, on which that worker
    relies: a gradient that is final early waits for those before it.
    """

    def __init__(self) -> None:
        self._zeros: dict[str, Callable[[], Tensor]] = {}
        self._final: dict[str, Tensor] = {}
        self._queues: dict[int, deque[P2PMessage]] = defaultdict(deque)
        self._queue_of: dict[str, deque[P2PMessage]] = {}
        self.sent_bytes = 0

    def expect(self, name: str, value: Tensor) -> None:
        """Note a value whose gradient will be sent, zeros if there is none."""
        self._zeros[name] = partial(torch.zeros, value.shape, dtype=value.dtype, device=value.device)

    def enter(self, name: str, value: Tensor) -> Tensor:
        """Return the same memory as a tensor that needs a gradient and is no leaf."""
        self.expect(name, value)
        anchor = torch.empty(0, requires_grad=True)  # an output is differentiable if an input is
        entered: Tensor = _Portal.apply(anchor, self, name, [value])  # type: ignore[no-untyped-call]
        assert entered.grad_fn is not None
        # Autograd goes on with the youngest node that is ready; a gradient that others wait for is to overtake it.
        entered.grad_fn._set_sequence_nr(FIRST)  # type: ignore[attr-defined]
        return entered

    def open(self, messages: Sequence[P2PMessage], send: SendGradient) -> None:
        """Begin a backward pass, whose gradients go by these messages, in order of rank."""
        self._send = send
        for message in messages:
            if message.name in self._zeros:
                queue = self._queue_of[message.name] = self._queues[message.receiver]
                queue.append(message)

    def send(self, name: str, gradient: Tensor) -> None:
        """Send a gradient, and those that waited for it, unless one before it in its queue is missing."""
        self._final[name] = gradient
        queue = self._queue_of[name]
        while queue and queue[0].name in self._final:
            message = queue.popleft()
            self.sent_bytes += self._send(message, self._final.pop(message.name))

    def close(self) -> None:
        """End the backward pass: send zeros where there is no gradient, since the value's source waits for one."""
        for queue in self._queues.values():
            for message in list(queue):
                if message.name not in self._final:
                    self.send(message.name, self._zeros[message.name]())
