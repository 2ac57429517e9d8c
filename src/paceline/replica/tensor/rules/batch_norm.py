"""Normalisations by channel: BatchNorm, InstanceNorm, GroupNorm."""

from collections.abc import Iterator
from typing import Any, ClassVar, final

import torch
from torch.fx import Node

from paceline.replica.tensor.base import Call, Offers, Rule, Way, Writer, offered, register
from paceline.replica.tensor.layouts import SHARED, Layout, Split

aten = torch.ops.aten


@final
class BatchNorm(Rule):
    """channels: S_p = some of the channels, of x and of weight, bias and running statistics; nothing is sent."""

    targets: ClassVar = (aten.batch_norm.default, aten.instance_norm.default)
    converts = False

    def ways(self, call: Call, offers: Offers) -> Iterator[Way]:
        x, *others = call.takes
        for split in offered(offers[0]):
            if split.dim == 1 - x.dims:
                takes: tuple[Layout, ...] = (split, *(split.at(-1) for _ in others))
                yield Way(takes, (split,), "channels", share=split.share)


@final
class GroupNorm(Rule):
    """channels: S_p = some of the groups, with their channels; nothing is sent. samples: S_p = everything."""

    targets: ClassVar = (aten.group_norm.default,)
    converts = False

    def ways(self, call: Call, offers: Offers) -> Iterator[Way]:
        x, *others = call.takes
        groups = call.argument(1, "num_groups")
        each = x.shape[1] // groups
        for split in offered(offers[0]):
            if split.dim == -x.dims:
                yield Way((split, *(SHARED for _ in others)), (split,), "samples", share=split.share)
            elif split.dim == 1 - x.dims and split.outer == 1 and not any(size % each for size in split.sizes):
                takes = (split, *(split.at(-1) for _ in others))
                yield Way(takes, (split,), "channels", _write(split, each), split.share)


def _write(split: Split, each: int) -> Any:
    def write(writer: Writer, call: Call) -> Node:
        return writer.same(call, num_groups=split.sizes[writer.shards.rank] // each)

    return write


for _rule in (BatchNorm(), GroupNorm()):
    register(_rule)
