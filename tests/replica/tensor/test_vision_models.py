"""Blocks of vision models as they are mostly written: each operator has a rule, and shards are the model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.replica.capture.capture import capture
from paceline.replica.tensor.base import rule_of
from paceline.replica.tensor.functionalize import functionalize
from paceline.replica.tensor.graph_ops import operator_graph
from paceline.replica.tensor.sharding_plan import plan_sharding
from tests.replica.tensor.cases import holds_its_part, same, split_share


class Windows(nn.Module):
    """Attention within shifted windows, with a bias for each distance (Liu et al. 2021, Swin)."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window, places = heads, window, window * window
        self.patches, self.norm = nn.Conv2d(3, width, 2, 2), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(11, heads))
        self.register_buffer("distances", torch.arange(places * places) * 7 % 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        samples, height, width, features = x.shape
        own, places = self.window, self.window**2
        y = torch.roll(self.norm(x), (-1, -1), (1, 2))
        y = y.view(samples, height // own, own, width // own, own, features).permute(0, 1, 3, 2, 4, 5)
        qkv = self.qkv(y.reshape(-1, places, features)).reshape(-1, places, 3, self.heads, features // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.distances].view(places, places, self.heads).permute(2, 0, 1)
        weights = (q @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1)
        y = self.out((weights @ v).transpose(1, 2).reshape(-1, places, features))
        y = y.view(samples, height // own, width // own, own, own, features).permute(0, 1, 3, 2, 4, 5)
        return (x + torch.roll(y.reshape(samples, height, width, features), (1, 1), (1, 2))).mean((1, 2))


class Mobile(nn.Module):
    """An inverted bottleneck whose channels are weighed, most of it in place (Howard et al. 2019, MobileNetV3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.stem = nn.Conv2d(3, channels, 1)
        self.wider = nn.Sequential(nn.Conv2d(channels, wide, 1), nn.BatchNorm2d(wide), nn.Hardswish(inplace=True))
        self.each = nn.Sequential(nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.ReLU6(inplace=True))
        self.less, self.more = nn.Conv2d(wide, channels, 1), nn.Conv2d(channels, wide, 1)
        self.narrower = nn.Conv2d(wide, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.each(self.wider(x))
        weights = self.more(F.relu(self.less(y.mean((2, 3), keepdim=True)), inplace=True))
        y = self.narrower(y * F.hardsigmoid(weights, inplace=True))
        y += x
        return y


class Responses(nn.Module):
    """Features weighed by their norms over the image (Woo et al. 2023, ConvNeXt V2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wider, self.narrower = nn.Linear(3, width), nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.wider(x.permute(0, 2, 3, 1)))
        norms = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
        return self.narrower(self.scale * (y * (norms / (norms.mean(-1, keepdim=True) + 1e-6))) + y)


MODELS = {"windows": lambda: Windows(18, 3, 2), "mobile": lambda: Mobile(6), "responses": lambda: Responses(12)}


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_shards_are_the_model(name: str, k: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = MODELS[name]().double()
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    captured = capture(model, x, operators=True)
    functionalize(captured.module)
    found = operator_graph(captured, k)
    differentiable = [call for call in found.calls.values() if any(value.differentiable for value in call.outputs)]
    assert not [call.target for call in differentiable if rule_of(call.target) is None]
    made = plan_sharding(found, k)
    same(made, model, x, f"{name}, k = {k}")
    holds_its_part(made, model)
    assert split_share(made, model) > 0.9
