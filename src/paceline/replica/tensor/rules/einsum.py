"""Products written with letters, one for each dim."""

from collections.abc import Iterator
from string import ascii_letters
from typing import ClassVar, NamedTuple, final

import torch
from torch.fx import Node

from paceline.replica.tensor.base import Available, OpCall, OpRule, OpStrategy, register, replicated, shards_among
from paceline.replica.tensor.placements import PARTIAL, Placement, Shard

aten = torch.ops.aten


class _Letters(NamedTuple):
    given: tuple[str, ...]
    """Of each tensor."""
    made: str


@final
class Einsum(OpRule):
    """y = Σ a·b·... over the letters that y lacks.

    A letter is divided, in every tensor that has it; the others are everyone's. Where y has it, S_p is a part of y;
    where y lacks it, y is a sum. Of a parameter S_p is then columns or rows.
    """

    targets: ClassVar = (aten.einsum.default,)

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        letters = _letters(call)
        if letters is None:
            return
        for letter, split in dict.fromkeys(_divisible(call, available, letters)):
            inputs = [_part(own, letter, split) for own in letters.given]
            alike = all(
                layout is None or value.shape[layout.dim] == split.length
                for value, layout in zip(call.inputs, inputs, strict=True)
            )
            if alike:
                filled = (layout or replicated(value) for layout, value in zip(inputs, call.inputs, strict=True))
                made: Placement = _part(letters.made, letter, split) or PARTIAL
                yield OpStrategy(tuple(filled), (made,), _name(call, inputs, made), share=split.share)
        for place, each in enumerate(available):
            if PARTIAL in each:
                others = (replicated(value) for value in call.inputs)
                yield OpStrategy(tuple(PARTIAL if i == place else other for i, other in enumerate(others)), (PARTIAL,))


def _letters(call: OpCall) -> _Letters | None:
    """None: a letter stands twice in a tensor, or a tensor twice among them."""
    equation, given = str(call.node.args[0]).replace(" ", ""), call.argument(1, "tensors")
    before, arrow, made = equation.partition("->")
    each = before.split(",")
    if not arrow:
        made = "..." * ("..." in before) + "".join(sorted(x for x in set(before) - {*",."} if before.count(x) == 1))
    if len(each) != len(call.inputs) or not all(isinstance(node, Node) for node in given):
        return None
    spare = "".join(letter for letter in ascii_letters if letter not in equation)
    counts = [value.dims - len(own.replace("...", "")) for own, value in zip(each, call.inputs, strict=True)]
    full = tuple(own.replace("...", spare[:count][::-1]) for own, count in zip(each, counts, strict=True))
    if any(len(set(own)) != len(own) for own in full):
        return None
    return _Letters(full, made.replace("...", spare[: call.outputs[0].dims - len(made.replace("...", ""))][::-1]))


def _divisible(call: OpCall, available: Available, letters: _Letters) -> Iterator[tuple[str, Shard]]:
    """Each letter and how it may be divided; the dim that the split has says nothing."""
    for value, own, each in zip(call.inputs, letters.given, available, strict=True):
        for split in shards_among(each):
            yield own[split.dim], split.at(-1)
        if value.parameter is not None:
            for letter, length in zip(own, value.shape, strict=True):
                yield from ((letter, split) for split in call.shardings(length, -1))


def _part(own: str, letter: str, split: Shard) -> Shard | None:
    return split.at(own.index(letter) - len(own)) if letter in own else None


def _name(call: OpCall, inputs: list[Shard | None], made: Placement) -> str:
    """As of a linear layer, where a parameter is divided."""
    if not any(value.parameter and layout for value, layout in zip(call.inputs, inputs, strict=True)):
        return ""
    return "row" if made == PARTIAL else "column"


register(Einsum())
