"""Dropout, with the random numbers of one process whatever the layout."""

from collections.abc import Iterator
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import Call, Offers, Rule, Way, Writer, offered, register
from paceline.replica.tensor.layouts import PARTIAL, Split
from paceline.replica.tensor.random import dropped

aten = torch.ops.aten


@final
class Dropout(Rule):
    """y = x·mask/(1 - p): S_p is whatever part x is divided into, of the mask as of x. Of terms each gets the mask."""

    targets: ClassVar = (aten.dropout.default, aten.dropout_.default, aten.native_dropout.default)
    converts = False

    def ways(self, call: Call, offers: Offers) -> Iterator[Way]:
        if len(call.gives) != 1:
            return
        trained = call.argument(2, "train", True) and 0 < call.argument(1, "p", 0.5) < 1
        for split in offered(offers[0]):
            yield Way((split,), (split,), write=_part(split) if trained else None, share=split.share)
        if PARTIAL in offers[0]:
            yield Way((PARTIAL,), (PARTIAL,))


def _part(split: Split) -> Any:
    def write(writer: Writer, call: Call) -> Node:
        return writer.module(Dropping(call.argument(1, "p"), split, writer.shards.rank), writer.new(call.takes[0].node))

    return write


@final
class Dropping(nn.Module):
    """Of one shard's part.

    Args:
        p: of an element to be dropped.
        split: how the whole is divided.
        shard: whose part it is.
    """

    def __init__(self, p: float, split: Split, shard: int) -> None:
        super().__init__()
        self._p, self._split, self._shard = p, split, shard

    def forward(self, part: Tensor) -> Tensor:
        """The part, with the same elements dropped as in the whole."""
        return dropped(part, self._p, self._split, self._shard)


register(Dropout())
