"""Where a value comes into a part, and its gradient goes out again.

::

    maker  ----- value ---->  | portal ==> part ==> ... |  consumer
           <--- gradient ---  |        <==      <== ... |
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.replica.pipeline.messages import Message

Give: TypeAlias = Callable[[Message, Tensor], None]


class Portals:
    """Those by which the differentiable values of one micro-batch come into one part."""

    def __init__(self) -> None:
        self._alike: dict[str, Callable[[], Tensor]] = {}
        self._returns: Returns | None = None

    def enter(self, name: str, value: Tensor) -> Tensor:
        """What the part is to be given for a value: the same memory, of which nobody is the leaf."""
        self._alike[name] = partial(torch.zeros, value.shape, dtype=value.dtype, device=value.device)
        entered: Tensor = _Portal.apply(_anchor(), self, name, [value])  # type: ignore[no-untyped-call]
        assert entered.grad_fn is not None
        # Autograd goes on with the youngest node that is ready; a gradient that others wait for is to overtake it.
        entered.grad_fn._set_sequence_nr(_URGENT)  # type: ignore[attr-defined]
        return entered

    def returning(self, messages: Sequence[Message], give: Give) -> "Returns":
        """A backward pass begins, and gradients go back by these messages."""
        self._returns = Returns([m for m in messages if m.name in self._alike], self._alike, give)
        return self._returns

    def made(self, name: str, gradient: Tensor) -> None:
        """The gradient of a value is there."""
        assert self._returns is not None, "there is one backward pass, and it has been announced"
        self._returns.made(name, gradient)


class Returns:
    """The gradients of one backward pass on their way back: each goes as soon as those before it have gone.

    Args:
        messages: by which they go, by rank.
        alike: makes zeros as a value has elements.
        give: sends one.
    """

    def __init__(self, messages: Sequence[Message], alike: Mapping[str, Callable[[], Tensor]], give: Give) -> None:
        self._alike, self._give = alike, give
        self._there: dict[str, Tensor] = {}
        self._lines: dict[int, deque[Message]] = defaultdict(deque)
        for message in messages:
            self._lines[message.receiver].append(message)
        self._line_of = {message.name: self._lines[message.receiver] for message in messages}

    def made(self, name: str, gradient: Tensor) -> None:
        """Send it, and those that have waited for it; but not before those that stand before it."""
        self._there[name] = gradient
        line = self._line_of[name]
        while line and line[0].name in self._there:
            message = line.popleft()
            self._give(message, self._there.pop(message.name))

    def close(self) -> None:
        """The pass has ended: what has no gradient gets zeros, since its maker waits for one."""
        for line in self._lines.values():
            for message in list(line):
                if message.name not in self._there:
                    self.made(message.name, self._alike[message.name]())


class _Portal(torch.autograd.Function):
    """A value in a list is none of the function's inputs, so the output is the value itself and no view of it."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, portals: Portals, name: str, value: list[Tensor]) -> Tensor:
        ctx.portals, ctx.name = portals, name
        return value[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.portals.made(ctx.name, gradients[0])
        return None, None, None, None


def _anchor() -> Tensor:
    """What makes an output differentiable that has no differentiable input."""
    return torch.empty(0, requires_grad=True)


_URGENT = 2**62
