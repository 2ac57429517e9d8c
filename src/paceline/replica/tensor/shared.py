"""Gradients of which each shard has a term: of parameters that all have and each uses for its part of the work."""

from collections.abc import Collection

import torch
from torch import Tensor

from paceline.replica.state import Layout
from paceline.replica.tensor.shards import Shards


class SharedTerms:
    """Those of one shard.

    Args:
        shards: who have a term each.
        layout: of this shard's tensors.
        names: of the parameters.
    """

    def __init__(self, shards: Shards, layout: Layout, names: Collection[str]) -> None:
        self._shards = shards
        self._places = [place for place, name in enumerate(layout.parameter_names) if name in names]

    def add_up(self, gradients: list[Tensor]) -> None:
        """Let those gradients be the sums over all shards; all of them call it together.

        Args:
            gradients: of all parameters, in the layout's order.
        """
        if not self._places:
            return
        terms = [gradients[place] for place in self._places]
        total = self._shards.all_reduce(torch.cat([term.reshape(-1) for term in terms]), "gradients that all share")
        for place, found in zip(self._places, torch.split(total, [term.numel() for term in terms]), strict=True):
            gradients[place] = found.view_as(gradients[place])
