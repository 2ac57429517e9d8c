"""How long an operator takes, forward and backward."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.types import Seconds
from paceline.program import Tree, leaves


class Taken(NamedTuple):
    """By an operator."""

    forward: Seconds = 0.0
    backward: Seconds = 0.0


class Stopwatch:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        source = torch.zeros(1, device=device, requires_grad=True)
        self._empty = statistics.median(self._backward(source.view(1), [source]) for _ in range(99))

    def time(self, call: Callable[[], Tree], sources: Sequence[Tensor]) -> tuple[Tree, Taken]:
        """What ``call`` returns, and how long it and its backward to ``sources`` take."""
        began = self._now()
        made = call()
        forward = self._now() - began
        return made, Taken(forward, max(0.0, self._backward(made, sources) - self._empty))

    def _backward(self, made: Tree, sources: Sequence[Tensor]) -> Seconds:
        ends = [tensor for tensor in leaves(made) if tensor.requires_grad]
        if not ends or not sources:
            return 0.0
        ones = [torch.ones_like(tensor) for tensor in ends]
        began = self._now()
        torch.autograd.grad(ends, sources, ones, allow_unused=True)
        return self._now() - began

    def _now(self) -> Seconds:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
