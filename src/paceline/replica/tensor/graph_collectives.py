"""Collectives as operators of a graph, which the graph calls in the order in which they were traced.

::

    traced    all_reduce(x)  ->  a node: collective([x], group, number), whose results have the known shapes
    run       collective([x], group, number)  ->  all_reduce(x) of the group's number-th call

TorchScript's interpreter knows no Python but that of operators, so all of them are one operator, which PyTorch calls.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.fx.node import has_side_effect

from paceline.core.types import Nanoseconds
from paceline.replica.tensor.tp_group import CollectiveModule, TPCollectives

Run: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Shapes: TypeAlias = Sequence[Sequence[int]]


class Call(NamedTuple):
    """One node of a graph.

    Args:
        run: makes the call for these tensors.
        shapes: of its results, whose type is that of its first argument.
    """

    run: Run
    shapes: Shapes


@final
class GraphCollectives(TPCollectives):
    """The group of a graph that is traced: a method adds a node, which calls that method of ``inner``.

    Args:
        inner: communicates.
    """

    def __init__(self, inner: TPCollectives) -> None:
        super().__init__(inner.rank, inner.count)
        self._inner = inner
        self._number = next(_NUMBERS)
        _GROUPS[self._number] = self
        self.calls: list[Call] = []
        self.alone = False
        """Whether calls return zeros, for a shard that is traced, or runs its graph, without the others."""
        self.error: BaseException | None = None
        """What the last call has raised, of which the interpreter keeps no more than the text."""
        self.turned_ns: Nanoseconds = 0
        """When the newest run of the graph came to :meth:`turn`."""

    def all_reduce(self, tensor: Tensor, description: str, *, largest: bool = False) -> Tensor:
        return self._like(tensor, lambda given: self._inner.all_reduce(given, description, largest=largest))

    def all_gather(self, part: Tensor, shapes: Shapes, description: str) -> list[Tensor]:
        return self._add([part], shapes, lambda given: self._inner.all_gather(given[0], shapes, description))

    def reduce_scatter(self, parts: Sequence[Tensor], description: str) -> Tensor:
        shapes = [parts[self.rank].shape]
        return self._add(parts, shapes, lambda given: [self._inner.reduce_scatter(given, description)])[0]

    def broadcast(self, tensor: Tensor, owner: int, description: str) -> Tensor:
        return self._like(tensor, lambda given: self._inner.broadcast(given, owner, description))

    def reduce(self, tensor: Tensor, owner: int, description: str) -> Tensor:
        return self._like(tensor, lambda given: self._inner.reduce(given, owner, description))

    def turn(self, loss: Tensor) -> None:
        """Add a node that notes when the graph comes to it, once ``loss`` is computed."""

        def note(given: Sequence[Tensor]) -> list[Tensor]:
            del given
            self.turned_ns = time.monotonic_ns()
            return []

        self._add([loss], [], note)

    def _like(self, tensor: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Add a node of one tensor, whose result has its shape."""
        return self._add([tensor], [tensor.shape], lambda given: [run(given[0])])[0]

    def _add(self, tensors: Sequence[Tensor], shapes: Shapes, run: Run) -> list[Tensor]:
        self.calls.append(Call(run, shapes))
        made: list[Tensor] = _collective(list(tensors), self._number, len(self.calls) - 1)
        return made

    def call(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Make one of the calls."""
        run, shapes = self.calls[number]
        if self.alone:
            return [tensors[0].new_zeros(tuple(shape)) for shape in shapes]
        try:
            return list(run(tensors))
        except BaseException as error:
            self.error = error
            raise

    @contextmanager
    def tracing(self, module: nn.Module) -> Iterator[None]:
        """Context manager: the modules of a shard that communicate do so by this group."""
        parts = [part for part in module.modules() if isinstance(part, CollectiveModule)]
        before = [part.shards for part in parts]
        for part in parts:
            part.shards = self
        try:
            yield
        finally:
            for part, shards in zip(parts, before, strict=True):
                part.shards = shards


_NUMBERS = itertools.count()
_GROUPS = WeakValueDictionary[int, GraphCollectives]()

_LIBRARY: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]
# Other shards wait for a call, so none is left out because nobody needs its results: not by TorchScript (conservative),
# nor by FX (a side effect).
_LIBRARY.define("collective(Tensor[] tensors, int group, int number) -> Tensor[]", alias_analysis="CONSERVATIVE")
_LIBRARY.impl(
    "collective",
    lambda tensors, group, number: _GROUPS[group].call(tensors, number),
    "CompositeExplicitAutograd",
)
_collective = torch.ops.paceline.collective.default
has_side_effect(_collective)
