"""Small models of many kinds, in float64, each with a batch and a loss: what must run however it is split.

>>> job = unet()
>>> job.loss(job.model()(job.inputs), job.targets).dtype
torch.float64
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Job(NamedTuple):
    model: Callable[[], nn.Module]
    """Random weights, under whatever seed is set."""
    inputs: Any
    """Six samples."""
    targets: Any
    loss: Callable[[Any, Any], Tensor]


SAMPLES = 6


def mlp() -> Job:
    """A plain nn.Sequential, one of its children another."""

    def model() -> nn.Module:
        head = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 5))
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), head).double()

    return Job(model, numbers(SAMPLES, 8), classes(5), F.cross_entropy)


def cnn() -> Job:
    """nn.Sequential with buffers."""

    def model() -> nn.Module:
        first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        second = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).double()

    return Job(model, numbers(SAMPLES, 1, 9, 9), classes(5), F.cross_entropy)


class UNet(nn.Module):
    """Two skips, the longest from the first layer to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_conv(2, 4), _conv(4, 8)])
        self.bottom = _conv(8, 8)
        self.up = nn.ModuleList([_conv(16, 4), _conv(8, 4)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips, value = [], image
        for block in self.down:
            value = block(value)
            skips.append(value)
            value = F.max_pool2d(value, 2)
        value = self.bottom(value)
        for block in self.up:
            value = F.interpolate(value, scale_factor=2.0)
            value = block(torch.cat([value, skips.pop()], 1))
        return self.head(value)


def unet() -> Job:
    return Job(lambda: UNet().double(), numbers(SAMPLES, 2, 8, 8), numbers(SAMPLES, 2, 8, 8), F.mse_loss)


class Inception(nn.Module):
    """Blocks of parallel branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(1, 6)
        self.blocks = nn.ModuleList([Branches(6), Branches(9)])
        self.head = nn.Linear(9, 5)

    def forward(self, image: Tensor) -> Tensor:
        value = self.stem(image)
        for block in self.blocks:
            value = block(value)
        return self.head(value.mean((2, 3)))


class Branches(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, 3, 1)
        self.three = nn.Sequential(nn.Conv2d(channels, 2, 1), _conv(2, 3))
        self.pool = nn.Conv2d(channels, 3, 1)

    def forward(self, value: Tensor) -> Tensor:
        pooled = F.avg_pool2d(value, 3, stride=1, padding=1)
        return torch.cat([F.relu(self.one(value)), self.three(value), F.relu(self.pool(pooled))], 1)


def inception() -> Job:
    return Job(lambda: Inception().double(), numbers(SAMPLES, 1, 6, 6), classes(5), F.cross_entropy)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(16, 5)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.head(self.layers(sequence).mean(1))


def encoder() -> Job:
    """torch's own transformer, with dropout."""
    return Job(lambda: Encoder().double(), numbers(SAMPLES, 7, 16), classes(5), F.cross_entropy)


class Tied(nn.Module):
    """A language model whose first and last layer are one matrix."""

    def __init__(self, words: int = 11, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.linspace(0.0, 1.0, width))

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.embedding(tokens) + self.shift
        for layer in self.layers:
            value = value + layer(value).tanh()
        return self.head(value)


def tied() -> Job:
    return Job(lambda: Tied().double(), tokens(11, 5), tokens(11, 5), per_token)


class Masked(nn.Module):
    """Called by names; a mask and a number of the input go to every layer, and the output is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.head = nn.Linear(12, 5)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        value = self.embedding(tokens)
        kept = mask.unsqueeze(-1)
        for layer in self.layers:
            value = value + layer(value).relu().masked_fill(~kept, 0.0)
        pooled = (value * kept).sum(1) / kept.sum(1)
        return {"scores": self.head(pooled), "hidden": (value, mask)}


def masked() -> Job:
    mask = torch.arange(7) < torch.arange(2, 2 + SAMPLES).unsqueeze(1)
    inputs = {"mask": mask, "tokens": tokens(11, 7)}
    return Job(lambda: Masked().double(), inputs, classes(5), lambda o, t: F.cross_entropy(o["scores"], t))


def gpt2() -> Job:
    transformers = installed()
    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=16, n_positions=32, vocab_size=29, bos_token_id=0, eos_token_id=0
    )
    return Job(
        lambda: transformers.GPT2LMHeadModel(config).double(),
        {"input_ids": tokens(29, 9)},
        tokens(29, 9),
        lambda o, t: per_token(o.logits, t),
    )


def bert() -> Job:
    transformers = installed()
    config = transformers.BertConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=32,
        max_position_embeddings=32,
        vocab_size=29,
        num_labels=5,
    )
    mask = (torch.arange(9) < torch.arange(4, 4 + SAMPLES).unsqueeze(1)).long()
    inputs = {"input_ids": tokens(29, 9), "attention_mask": mask}
    return Job(lambda: transformers.BertForSequenceClassification(config).double(), inputs, classes(5), by_logits)


def vit() -> Job:
    transformers = installed()
    config = transformers.ViTConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=32,
        image_size=12,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
    )
    inputs = {"pixel_values": numbers(SAMPLES, 3, 12, 12)}
    return Job(lambda: transformers.ViTForImageClassification(config).double(), inputs, classes(5), by_logits)


def resnet() -> Job:
    transformers = installed()
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5
    )
    inputs = {"pixel_values": numbers(SAMPLES, 3, 16, 16)}
    return Job(lambda: transformers.ResNetForImageClassification(config).double(), inputs, classes(5), by_logits)


ZOO: dict[str, Callable[[], Job]] = {
    make.__name__: make for make in (mlp, cnn, unet, inception, encoder, tied, masked, gpt2, bert, vit, resnet)
}


def installed() -> Any:
    return pytest.importorskip("transformers", reason="models of transformers are looked at where it is installed")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def tokens(kinds: int, length: int) -> Tensor:
    return torch.randint(kinds, (SAMPLES, length), generator=torch.Generator().manual_seed(kinds))


def classes(kinds: int) -> Tensor:
    return torch.arange(SAMPLES) % kinds


def per_token(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def by_logits(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


def _conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU())
