"""What is trained: eight equal transformer layers in a row, on random data. The same A_0 and batch on every side."""

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn

SEED = 0

LAYERS = 8

MICRO_BATCHES = 8
"""m, of a step whose time is measured."""

Loss = nn.functional.mse_loss


class Layer(nn.Module):
    """Attention and an MLP four times as wide, each behind a norm and beside a skip connection; no dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.mixed(self._attended(self.queries_keys_values(self.before_attention(x))))
        made: Tensor = attended + self.narrow(nn.functional.gelu(self.wide(self.before_mlp(attended))))
        return made

    def _attended(self, projected: Tensor) -> Tensor:
        samples, tokens, _ = projected.shape
        apart = projected.view(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*apart)
        return attended.transpose(1, 2).reshape(samples, tokens, -1)


class Size(NamedTuple):
    """How large the layers are, and a micro-batch."""

    width: int
    heads: int
    tokens: int
    samples: int
    """Of a micro-batch."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a micro-batch, of its target, and of what every layer makes of it."""
        return self.samples, self.tokens, self.width

    def make(self) -> nn.Sequential:
        """The model; to be called under a seed."""
        return nn.Sequential(*(Layer(self.width, self.heads) for _ in range(LAYERS)))

    def built(self) -> nn.Sequential:
        """The model at A_0."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SEED)
            return self.make()

    def batch(self, micro_batches: int) -> tuple[Tensor, Tensor]:
        """The one mini-batch, fed again and again: inputs and targets."""
        draw = torch.Generator().manual_seed(SEED)
        samples, *rest = self.shape
        x, y = (torch.randn(micro_batches * samples, *rest, generator=draw) for _ in range(2))
        return x, y


SIZES = {"large": Size(256, 4, 64, 4), "small": Size(64, 4, 32, 5), "tiny": Size(8, 2, 4, 1)}
"""By name: a step on two cores takes about half a second, about 50 ms, and next to nothing."""


def parts(model: nn.Sequential, count: int) -> list[nn.Sequential]:
    """A model cut into parts of equally many layers, which keep their names.

    >>> [list(part._modules) for part in parts(SIZES["tiny"].built(), 4)]
    [['0', '1'], ['2', '3'], ['4', '5'], ['6', '7']]
    """
    layers, each = list(model.named_children()), LAYERS // count
    return [nn.Sequential(OrderedDict(layers[first : first + each])) for first in range(0, LAYERS, each)]


def cuts(count: int) -> tuple[str, ...]:
    """The names of the layers that the parts after the first begin with.

    >>> cuts(4)
    ('2', '4', '6')
    """
    return tuple(str(first) for first in range(LAYERS // count, LAYERS, LAYERS // count))
