"""What an own loop's optimizer says with each Δ: the options of its groups, and which of several optimizers steps.

Both are numbers, in a running buffer of the model, so that they travel with every Δ and come back with every A::

    Δ    | 1: it is of part 0 | -                 | lr, momentum, ... of its groups | 0 | -                 | ...
    A    | 1                  | updates of part 0 | as they are                     | 1 | updates of part 1 | ...

A part is the parameters of one optimizer. An update steps those parts that some of its Δs are of, each by the mean of
the options and the gradients of these Δs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from math import isclose
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.base import STEP_OPTIONS
from paceline.optim.several import SeveralOptimizers

# Name of the buffer in the model.
BUFFER = STEP_OPTIONS

# Options as one part of the vector has them, but for what schedulers and torch keep there for themselves.
_NO_OPTIONS = ("params", "initial_lr")

# A mean of equal numbers may be off by some roundings: that is no change of an option.
_SAME = 1e-12

Group: TypeAlias = dict[str, Any]


def optimizers_of(optimizer: Optimizer) -> Mapping[str, Optimizer]:
    """Return each of several optimizers by name; a single one, whose name is empty."""
    return optimizer.parts if isinstance(optimizer, SeveralOptimizers) else {"": optimizer}


@dataclass(frozen=True)
class OptionsCodec:
    """The places of the options of an optimizer in a vector.

    Args:
        keys: for each part, for each of its groups: names of the options that are numbers, and how many each has.
    """

    keys: tuple[tuple[tuple[tuple[str, int], ...], ...], ...]

    @classmethod
    def of(cls, optimizer: Optimizer) -> "OptionsCodec":
        """Return that of an optimizer which no scheduler has written to."""
        groups = (each.param_groups for each in optimizers_of(optimizer).values())
        return cls(tuple(tuple(tuple(_numbers(group)) for group in part) for part in groups))

    def numbers(self, optimizer: Optimizer) -> list[list[float]]:
        """Return the options of each group that are numbers, one part's after the other's."""
        return [
            [value for name, _ in names for value in _as_numbers(group[name])]
            for keys, part in zip(self.keys, optimizers_of(optimizer).values(), strict=True)
            for names, group in zip(keys, part.param_groups, strict=False)  # a loop may have added some
        ]

    def others(self, optimizer: Optimizer) -> list[Group]:
        """Return all other options of each group, and its number of parameters."""
        found = list[Group]()
        for keys, part in zip(self.keys, optimizers_of(optimizer).values(), strict=True):
            for names, group in zip(chain(keys, repeat(())), part.param_groups, strict=False):
                known = {*_NO_OPTIONS, *(name for name, _ in names)}
                rest = {name: value for name, value in group.items() if name not in known}
                found.append({"params": len(group["params"]), **rest})
        return found

    def encode(self, numbers: Sequence[Sequence[float]], steps: Collection[int]) -> Tensor:
        """Return the vector of a Δ.

        Args:
            numbers: the options, as :meth:`numbers` returns them.
            steps: numbers of the parts that the Δ is of.
        """
        vector, groups = list[float](), iter(numbers)
        for part, keys in enumerate(self.keys):
            own = [float(part in steps), 0.0, *chain.from_iterable(islice(groups, len(keys)))]
            # Of a Δ that is not of this part the options count for nothing.
            vector += own if part in steps else [0.0] * len(own)
        return torch.tensor(vector, dtype=torch.float64)

    def _cut(self, vector: Tensor) -> Iterator[list[float]]:
        """Yield the numbers of each part."""
        numbers = iter(vector.tolist())
        for part in self.keys:
            yield list(islice(numbers, 2 + sum(count for group in part for _, count in group)))

    def updates(self, vector: Tensor) -> list[int]:
        """Return for each part how many updates it has had, from the vector of an A."""
        return [round(updates) for _, updates, *_ in self._cut(vector)]

    def write_to(self, optimizer: Optimizer, vector: Tensor, *, options: bool = True) -> None:
        """Let an optimizer have the options of a vector, of those parts that were stepped, and make those steps alone.

        Args:
            optimizer: whose groups are written.
            vector: mean of those of some Δs.
            options: False: its options stay, for a scheduler of the program's writes them.
        """
        shares = list[float]()
        for part, keys, own in zip(optimizers_of(optimizer).values(), self.keys, self._cut(vector), strict=True):
            share, _, *values = own
            shares.append(share)
            remaining = iter(values)
            for group, names in zip(part.param_groups, keys, strict=True) if share and options else ():
                for name, count in names:
                    _write(group, name, [next(remaining) / share for _ in range(count)])
        if isinstance(optimizer, SeveralOptimizers):
            optimizer.shares = dict(zip(optimizer.parts, shares, strict=True))

    def updated(self, optimizer: Optimizer, before: Tensor, mean: Tensor) -> Tensor:
        """Return the vector of an A: its options as they are, and the updates of each part with this one."""
        after, at = self.encode(self.numbers(optimizer), range(len(self.keys))), 0
        for (_, updates, *values), (share, *_) in zip(self._cut(before), self._cut(mean), strict=True):
            after[at + 1] = updates + (share > 0)
            at += 2 + len(values)
        return after


def _numbers(group: Group) -> Iterator[tuple[str, int]]:
    for name, value in sorted(group.items()):
        if name not in _NO_OPTIONS and (numbers := _as_numbers(value)):
            yield name, len(numbers)


def _as_numbers(value: Any) -> list[float]:
    """Return an option as numbers; none if it is anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return [float(value)]
    values = value if isinstance(value, (tuple, list)) else (value,)
    plain = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values)
    return [float(each) for each in values] if plain else []


def _write(group: Group, name: str, values: list[float]) -> None:
    old = group[name]
    if all(isclose(new, was, rel_tol=_SAME) for new, was in zip(values, _as_numbers(old), strict=True)):
        return
    if isinstance(old, Tensor):
        old.fill_(values[0])
    elif isinstance(old, (tuple, list)):
        group[name] = type(old)(values)
    else:
        group[name] = values[0]


@dataclass(frozen=True)
class WithStepOptions:
    """Makes a model with the buffer, which no state_dict has.

    Args:
        model: makes the user's.
        vector: of A_0.
    """

    model: Callable[[], nn.Module]
    vector: tuple[float, ...]

    def __call__(self) -> nn.Module:
        """Make the model."""
        module = without_options(self.model())  # a factory may return the same module twice
        module.register_buffer(BUFFER, torch.tensor(self.vector, dtype=torch.float64), persistent=False)
        return module


def without_options(module: nn.Module) -> nn.Module:
    """Remove the buffer from a model, and return it."""
    module._buffers.pop(BUFFER, None)
    module._non_persistent_buffers_set.discard(BUFFER)
    return module
