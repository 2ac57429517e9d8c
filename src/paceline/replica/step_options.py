"""What an own loop's optimizer says with each Δ: the options of its groups, and which of several optimizers steps.

Both are numbers, in a running buffer of the model, so that they travel with every Δ and come back with every A::

    Δ    | 1: it is of part 0 | -                 | lr, momentum, ... of its groups | 0 | -                 | ...
    A    | 1                  | updates of part 0 | as they are                     | 1 | updates of part 1 | ...

A part is the parameters of one optimizer. An update steps those parts that some of its Δs are of, each by the mean of
the options and the gradients of these Δs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
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


def parts_of(optimizer: Optimizer) -> Mapping[str, list[Group]]:
    """Return the groups of each of several optimizers by name; of a single one, whose name is empty."""
    if isinstance(optimizer, SeveralOptimizers):
        return {name: each.param_groups for name, each in optimizer.parts.items()}
    return {"": optimizer.param_groups}


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
        return cls(tuple(tuple(tuple(_numbers(group)) for group in groups) for groups in parts_of(optimizer).values()))

    def options(self, optimizer: Optimizer) -> tuple[list[list[float]], list[Group]]:
        """Return the options of each group: those that are numbers, and the others with the number of parameters."""
        numbers, others = list[list[float]](), list[Group]()
        for part, groups in enumerate(parts_of(optimizer).values()):
            for i, group in enumerate(groups):
                names = [name for name, _ in self.keys[part][i]] if i < len(self.keys[part]) else []
                numbers.append([value for name in names for value in _as_numbers(group[name])])
                rest = {name: value for name, value in group.items() if name not in (*names, *_NO_OPTIONS)}
                others.append({"params": len(group["params"]), **rest})
        return numbers, others

    def encode(self, optimizer: Optimizer, steps: Collection[int]) -> Tensor:
        """Return the vector of a Δ.

        Args:
            optimizer: has the options.
            steps: numbers of the parts that the Δ is of.
        """
        numbers = list[float]()
        for part, (keys, groups) in enumerate(zip(self.keys, parts_of(optimizer).values(), strict=True)):
            own = [float(part in steps), 0.0]
            for names, group in zip(keys, groups, strict=True):
                own += [value for name, _ in names for value in _as_numbers(group[name])]
            # Of a Δ that is not of this part the options count for nothing.
            numbers += own if part in steps else [0.0] * len(own)
        return torch.tensor(numbers, dtype=torch.float64)

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
        for groups, keys, own in zip(parts_of(optimizer).values(), self.keys, self._cut(vector), strict=True):
            share, _, *values = own
            shares.append(share)
            remaining = iter(values)
            for group, names in zip(groups, keys, strict=True) if share and options else ():
                for name, count in names:
                    _write(group, name, [next(remaining) / share for _ in range(count)])
        if isinstance(optimizer, SeveralOptimizers):
            optimizer.shares = dict(zip(optimizer.parts, shares, strict=True))

    def updated(self, optimizer: Optimizer, before: Tensor, mean: Tensor) -> Tensor:
        """Return the vector of an A: its options as they are, and the updates of each part with this one."""
        after, at = self.encode(optimizer, range(len(self.keys))), 0
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
