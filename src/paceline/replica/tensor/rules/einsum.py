"""Einsum: products of tensors in letters, one for each dim."""

from collections.abc import Iterator
from string import ascii_letters

from torch.fx import Node

from paceline.replica.tensor.base import Available, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import PARTIAL, Placement, Shard


@op_rule(aten.einsum.default)
def einsum(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = Σ a·b·... over the letters that y lacks.

    A letter is sharded, in every tensor that has it; the others are replicated. Where y has it, S_p is a part of y;
    where y lacks it, y is a sum. Of a parameter S_p is then columns or rows.
    """
    letters = _letters(call)
    if letters is None:
        return
    input_letters, output_letters = letters
    for letter, split in dict.fromkeys(_shardable(call, available, input_letters)):
        parts = [_part(own, letter, split) for own in input_letters]
        pairs = list(zip(call.inputs, parts, strict=True))
        if any(part is not None and value.shape[part.dim] != split.length for value, part in pairs):
            continue
        output: Placement = _part(output_letters, letter, split) or PARTIAL
        name = ("row" if output == PARTIAL else "column") if any(v.parameter and part for v, part in pairs) else ""
        inputs = tuple(part or value.replicated for value, part in pairs)
        yield OpStrategy(inputs, (output,), name, share=split.share)
    for place, each in enumerate(available):
        if PARTIAL in each:  # linear in each of its inputs
            inputs = tuple(PARTIAL if i == place else value.replicated for i, value in enumerate(call.inputs))
            yield OpStrategy(inputs, (PARTIAL,))


def _letters(call: OpCall) -> tuple[tuple[str, ...], str] | None:
    """Return the letters of each input and of the output, of dims in dots too.

    None: a letter is twice in a tensor's, or a tensor twice among the inputs.
    """
    equation, tensors = str(call.node.args[0]).replace(" ", ""), call.argument(1, "tensors")
    before, arrow, output = equation.partition("->")
    each = before.split(",")
    if not arrow:
        output = "..." * ("..." in before) + "".join(sorted(x for x in set(before) - {*",."} if before.count(x) == 1))
    if len(each) != len(call.inputs) or not all(isinstance(node, Node) for node in tensors):
        return None
    # Dots stand for as many dims as are left over; the last ones are the same in all tensors.
    spare = "".join(letter for letter in ascii_letters if letter not in equation)
    counts = [value.dims - len(own.replace("...", "")) for own, value in zip(each, call.inputs, strict=True)]
    inputs = tuple(own.replace("...", spare[:count][::-1]) for own, count in zip(each, counts, strict=True))
    if any(len(set(own)) != len(own) for own in inputs):
        return None
    return inputs, output.replace("...", spare[: call.outputs[0].dims - len(output.replace("...", ""))][::-1])


def _shardable(call: OpCall, available: Available, letters: tuple[str, ...]) -> Iterator[tuple[str, Shard]]:
    """Yield each letter and how it can be sharded; the dim of the sharding has no meaning."""
    for value, own, each in zip(call.inputs, letters, available, strict=True):
        for split in shards_among(each):
            yield own[split.dim], split.at(-1)
        if value.parameter is not None:
            for letter, length in zip(own, value.shape, strict=True):
                yield from ((letter, split) for split in call.shardings(length, -1))


def _part(own: str, letter: str, split: Shard) -> Shard | None:
    return split.at(own.index(letter) - len(own)) if letter in own else None
