"""Tensors broadcast against each other, as a loss does it before it compares them."""

from collections.abc import Iterator
from typing import ClassVar, final

import torch

from paceline.replica.tensor.base import Call, Offers, Rule, Way, offered, register
from paceline.replica.tensor.rules.elementwise import along

aten = torch.ops.aten


@final
class Broadcast(Rule):
    """S_p is the same part of all of them; what is broadcast along the divided dim is everyone's."""

    targets: ClassVar = (aten.broadcast_tensors.default,)
    converts = False

    def ways(self, call: Call, offers: Offers) -> Iterator[Way]:
        made = call.gives[0]
        for split in dict.fromkeys(split for each in offers for split in offered(each)):
            if -split.dim > made.dims or made.shape[split.dim] != split.length:
                continue
            takes = along(call, split)
            if takes is not None and split in takes:
                yield Way(takes, tuple(split for _ in call.gives), share=split.share)


register(Broadcast())
