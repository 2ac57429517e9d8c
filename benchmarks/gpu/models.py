"""What is trained, in plain torch on random data: an MLP, GPT-2 small, ResNet-50, and layers that can be divided."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from kit.blocks import Attention
from torch import Tensor, nn
from torch.optim import SGD, AdamW

Data = tuple[Tensor, Tensor]

SEED = 0

CLASSES = 1000


class Task(NamedTuple):
    """A model, its data and how it is trained.

    Args:
        make: the model, of these sizes; to be called under a seed.
        sizes: of a measurement, by name.
        small: sizes that a CPU trains in milliseconds.
        data: inputs and targets of a batch of these sizes, from a generator.
        optimizer: of parameters.
        loss: (output, target) -> mean over the batch.
        layer: the kind of layer that repeats.
        precision: "bf16" is autocast.
    """

    make: Callable[..., nn.Module]
    sizes: Mapping[str, Any]
    small: Mapping[str, Any]
    data: Callable[..., Data]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    layer: type[nn.Module]
    precision: str = "fp32"


class Block(nn.Module):
    """A layer of GPT-2: causal attention and an MLP four times as wide, each behind a norm and beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        made: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.before_mlp(x)), approximate="tanh"))
        return made


class GPT2(nn.Module):
    """Radford et al. 2019, without dropout; the head is the embedding."""

    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        scores: Tensor = self.head(self.norm(self.layers(self.tokens(text) + self.places(places))))
        return scores


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions to four times as many channels, beside a skip (He et al. 2016)."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        sizes = [(channels, inner, 1, 1), (inner, inner, 3, stride), (inner, 4 * inner, 1, 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, size, step, padding=size // 2, bias=False) for a, b, size, step in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or channels != 4 * inner:
            skip = nn.Conv2d(channels, 4 * inner, 1, stride, bias=False)
            self.skip = nn.Sequential(skip, nn.BatchNorm2d(4 * inner))

    def forward(self, x: Tensor) -> Tensor:
        made = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            made = norm(convolution(made))
            made = nn.functional.relu(made) if number < 2 else made
        return nn.functional.relu(made + self.skip(x))


def resnet(width: int, blocks: tuple[int, ...], side: int) -> nn.Module:
    """ResNet-50, where width is 64 and blocks are (3, 4, 6, 3), of images whose sides are so long."""
    del side  # of the data alone
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for number in range(count):
            layers.append(Bottleneck(channels, inner, 2 if stage and not number else 1))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def mlp(width: int) -> nn.Module:
    """Three layers of one width, and the head."""
    hidden = itertools.chain.from_iterable((nn.Linear(width, width), nn.ReLU()) for _ in range(3))
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def stack(width: int, heads: int, layers: int, length: int) -> nn.Module:
    """Layers of a transformer, nothing else: each can be a stage, or be divided by heads and columns."""
    del length  # of the data alone
    return nn.Sequential(*(Attention(width, heads) for _ in range(layers)))


def next_words(scores: Tensor, words: Tensor) -> Tensor:
    """The loss of a language model: the mean over all words."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def _rows(samples: int, draw: torch.Generator, width: int) -> Data:
    return torch.randn(samples, width, generator=draw), torch.randint(CLASSES, (samples,), generator=draw)


def _text(samples: int, draw: torch.Generator, words: int, length: int, **rest: int) -> Data:
    text = torch.randint(words, (samples, length + 1), generator=draw)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _images(samples: int, draw: torch.Generator, side: int, **rest: Any) -> Data:
    images = torch.randn(samples, 3, side, side, generator=draw)
    return images, torch.randint(CLASSES, (samples,), generator=draw)


def _layers(samples: int, draw: torch.Generator, width: int, length: int, **rest: int) -> Data:
    x, y = (torch.randn(samples, length, width, generator=draw) for _ in range(2))
    return x, y


MOMENTUM = functools.partial(SGD, lr=0.01, momentum=0.9)

TASKS: dict[str, Task] = {
    "mlp": Task(mlp, {"width": 4096}, {"width": 16}, _rows, MOMENTUM, nn.functional.cross_entropy, nn.Linear),
    "gpt2": Task(
        GPT2,
        {"layers": 12, "width": 768, "heads": 12, "words": 50257, "length": 1024},
        {"layers": 2, "width": 16, "heads": 2, "words": 64, "length": 8},
        _text,
        functools.partial(AdamW, lr=1e-4),
        next_words,
        Block,
        "bf16",
    ),
    "resnet50": Task(
        resnet,
        {"width": 64, "blocks": (3, 4, 6, 3), "side": 224},
        {"width": 4, "blocks": (1, 1, 1, 1), "side": 32},
        _images,
        MOMENTUM,
        nn.functional.cross_entropy,
        Bottleneck,
    ),
    "stack": Task(
        stack,
        {"width": 1024, "heads": 16, "layers": 8, "length": 256},
        {"width": 16, "heads": 2, "layers": 4, "length": 8},
        _layers,
        MOMENTUM,
        nn.functional.mse_loss,
        Attention,
    ),
}

SAMPLES = {"mlp": 4096, "gpt2": 16, "resnet50": 64, "stack": 8}
"""Of a step."""

SMALL_SAMPLES = 8


class Job(NamedTuple):
    """One task on one type of device.

    Args:
        task: its name.
        kind: of the device, as torch names it.
        small: whether sizes are those of a trial.
    """

    task: str
    kind: str
    small: bool = False

    @property
    def about(self) -> Task:
        """The task."""
        return TASKS[self.task]

    @property
    def samples(self) -> int:
        """Of a step."""
        return SMALL_SAMPLES if self.small else SAMPLES[self.task]

    def make(self) -> nn.Module:
        """The model; to be called under a seed."""
        return self.about.make(**(self.about.small if self.small else self.about.sizes))

    def built(self) -> nn.Module:
        """The model at A_0, on the device."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SEED)
            return self.make().to(self.kind)

    def batch(self, part: int = 0, parts: int = 1) -> Data:
        """The one batch, or a part of it, on the device: fed again and again, so that data cost nothing."""
        x, y = (each.chunk(parts)[part].to(self.kind) for each in self.host_batch(self.samples))
        return x, y

    def host_batch(self, samples: int) -> Data:
        """The first samples of it, in the host's memory."""
        sizes = self.about.small if self.small else self.about.sizes
        x, y = self.about.data(self.samples, torch.Generator().manual_seed(SEED), **sizes)
        return x[:samples], y[:samples]

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Forward and loss, under autocast where the task has it."""
        with torch.autocast(self.kind, dtype=torch.bfloat16, enabled=self.about.precision == "bf16"):
            return self.about.loss(model(x), y)
