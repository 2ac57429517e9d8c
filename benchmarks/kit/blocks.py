"""Blocks that several benchmarks train: a perceptron, a transformer's layer, a bottleneck of convolutions."""

from torch import Tensor, nn


class Perceptron(nn.Module):
    """Two blocks D -> 4D -> D beside skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Attention(nn.Module):
    """A transformer layer: attention and an MLP four times as wide, each behind a norm and beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.mixed = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before_attention(x)
        q, k, v = (
            made.view(*made.shape[:2], self.heads, -1).transpose(1, 2)
            for made in (self.queries(normed), self.keys(normed), self.values(normed))
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.mixed(attended)
        made: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.before_mlp(x))))
        return made


class Residual(nn.Module):
    """A bottleneck of ResNet: 1 × 1, 3 × 3 and 1 × 1 convolutions, each with BatchNorm, beside a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 4
        sizes = [(channels, inner, 1), (inner, inner, 3), (inner, channels, 1)]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, size, padding=size // 2) for a, b, size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        made = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            made = nn.functional.relu(norm(convolution(made)))
        return x + made
