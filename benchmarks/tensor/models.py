"""What is trained: blocks whose operators can be divided, on random data. The same A_0 and batch on every side."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from kit.blocks import Attention, Perceptron, Residual
from torch import Tensor, nn

SEED = 0

Loss = nn.functional.mse_loss


class Inception(nn.Module):
    """Four branches side by side, joined by their channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        quarter = channels // 4
        self.one = nn.Conv2d(channels, quarter, 1)
        self.three = nn.Sequential(
            nn.Conv2d(channels, quarter, 1), nn.ReLU(), nn.Conv2d(quarter, quarter, 3, padding=1)
        )
        self.five = nn.Sequential(nn.Conv2d(channels, quarter, 1), nn.ReLU(), nn.Conv2d(quarter, quarter, 5, padding=2))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(channels, quarter, 1))

    def forward(self, x: Tensor) -> Tensor:
        branches = [branch(x) for branch in (self.one, self.three, self.five, self.pooled)]
        return nn.functional.relu(torch.cat(branches, 1))


class Row(NamedTuple):
    """One model, and the shape of its batch, of which its output has the same."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtensor: Callable[[nn.Module], dict[str, str]] | None = None
    """Module -> how torch's parallelize_module divides it: "column" or "row"; None: it can't."""

    def built(self) -> nn.Module:
        """The model at A_0."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SEED)
            return self.make()

    def batch(self, samples: int | None = None) -> tuple[Tensor, Tensor]:
        """The one batch, fed again and again: input and target."""
        draw = torch.Generator().manual_seed(SEED)
        shape = self.shape if samples is None else (samples, *self.shape[1:])
        return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)


def _perceptron(model: nn.Module) -> dict[str, str]:
    del model
    return {f"blocks.{block}.{layer}": way for block in (0, 1) for layer, way in ((0, "column"), (2, "row"))}


def _attention(model: nn.Module) -> dict[str, str]:
    del model
    return dict.fromkeys(("queries", "keys", "values", "wide"), "column") | dict.fromkeys(("mixed", "narrow"), "row")


ROWS = {
    "mlp 256": Row(lambda: Perceptron(256), (64, 256), _perceptron),
    "mlp 512": Row(lambda: Perceptron(512), (256, 512), _perceptron),
    "mlp 1024": Row(lambda: Perceptron(1024), (128, 1024), _perceptron),
    "transformer": Row(lambda: Attention(256, 8), (8, 64, 256), _attention),
    "resnet": Row(lambda: Residual(256), (8, 256, 14, 14)),
    "inception": Row(lambda: Inception(128), (8, 128, 14, 14)),
    "tiny": Row(lambda: Perceptron(8), (4, 8), _perceptron),
}
"""By name; the last one is for trying the benchmark itself."""
