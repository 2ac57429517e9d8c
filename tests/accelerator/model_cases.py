"""Models trained on the device ``sim`` as on the CPU, with the same bits: outputs, gradients, parameters, buffers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 3

VECTORS, IMAGES, SEQUENCES, TOKENS, CLASSES = "vectors", "images", "sequences", "tokens", "classes"


def inputs(kind: str) -> Tensor:
    """Four samples, the same ones each time."""
    generator = torch.Generator().manual_seed(3)
    if kind in (TOKENS, CLASSES):
        return torch.randint(7, (4, 5) if kind == TOKENS else (4,), generator=generator)
    shape = {VECTORS: (4, 6), IMAGES: (4, 3, 8, 8), SEQUENCES: (4, 5, 8)}[kind]
    return torch.randn(shape, generator=generator)


class Attention(nn.Module):
    """Self-attention, with or without its weights, which torch computes by another kernel."""

    def __init__(self, *, weights: bool, dropout: float) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.weights)[0]


class Checkpointed(nn.Module):
    """Layers whose activations are computed anew in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(6, 6), mlp(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


class Autocast(nn.Module):
    """A model under autocast of the device of its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.model(x)


def mlp() -> nn.Module:
    """Three kinds of activation, and dropout."""
    return nn.Sequential(
        *(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5), nn.SiLU()),
        nn.Linear(5, 3),
    )


def cnn() -> nn.Module:
    """Convolutions with and without biases, and layers that keep statistics."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2)),
        *(nn.ConvTranspose2d(4, 4, 3, bias=False), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Linear(16, 3),
    )


def embedded() -> nn.Module:
    """Embeddings, tied to nothing."""
    return nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def encoder(dropout: float = 0.1) -> nn.Module:
    """A layer of a transformer."""
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    """Two layers, both ways."""
    return kind(8, 6, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)


Make = Callable[[], nn.Module]

MODELS: dict[str, tuple[Make, str]] = {
    "mlp": (mlp, VECTORS),
    "cnn": (cnn, IMAGES),
    "embedding": (embedded, TOKENS),
    "attention": (functools.partial(Attention, weights=False, dropout=0.0), SEQUENCES),
    "attention_with_dropout": (functools.partial(Attention, weights=False, dropout=0.1), SEQUENCES),
    "attention_with_weights": (functools.partial(Attention, weights=True, dropout=0.1), SEQUENCES),
    "encoder": (encoder, SEQUENCES),
    "lstm": (functools.partial(recurrent, nn.LSTM), SEQUENCES),
    "gru": (functools.partial(recurrent, nn.GRU), SEQUENCES),
    "rnn": (functools.partial(recurrent, nn.RNN), SEQUENCES),
    "checkpointed": (functools.partial(Checkpointed, reentrant=False), VECTORS),
    "checkpointed_reentrant": (functools.partial(Checkpointed, reentrant=True), VECTORS),
    "autocast_mlp": (lambda: Autocast(mlp()), VECTORS),
    "autocast_cnn": (lambda: Autocast(cnn()), IMAGES),
    "autocast_encoder": (lambda: Autocast(encoder()), SEQUENCES),
    "autocast_lstm": (lambda: Autocast(recurrent(nn.LSTM)), SEQUENCES),
}

Optimizer = Callable[..., torch.optim.Optimizer]
SGD: Optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd_foreach": functools.partial(SGD, nesterov=True, weight_decay=0.1, foreach=True),
    "adam_foreach": functools.partial(torch.optim.Adam, foreach=True),
    "adam_loop": functools.partial(torch.optim.Adam, foreach=False),
    "adamw_foreach": functools.partial(torch.optim.AdamW, amsgrad=True, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, fused=True),
    "rmsprop_foreach": functools.partial(torch.optim.RMSprop, foreach=True),
}


def trained(make: Make, x: Tensor, device: str, dtype: torch.dtype, optimizer: Optimizer) -> list[Tensor]:
    """Return outputs, gradients and state after a few steps."""
    torch.manual_seed(0)
    model = make().to(device, dtype)
    x = x.to(device, dtype) if x.is_floating_point() else x.to(device)
    steps, outputs = optimizer(model.parameters()), []
    torch.manual_seed(1)  # the device's generator too: it has drawn nothing yet, unlike the CPU's
    for _ in range(STEPS):
        steps.zero_grad()
        output = model(x)
        output = output[0] if isinstance(output, tuple) else output
        target = inputs(CLASSES).to(device) % output.flatten(1).shape[1]
        nn.functional.cross_entropy(output.flatten(1), target).backward()
        steps.step()
        outputs.append(output.detach())
    return [*outputs, *(p.grad for p in model.parameters()), *model.state_dict().values()]


def assert_same(on_cpu: Sequence[Tensor], on_device: Sequence[Tensor]) -> None:
    """Raise AssertionError unless all are equal in every bit, the second ones on the device."""
    for number, (expected, found) in enumerate(zip(on_cpu, on_device, strict=True)):
        assert expected.device.type == "cpu", number
        assert found.device.type == "sim", number
        assert expected.dtype == found.dtype, number
        assert expected.shape == found.shape, number
        off = (expected.double() - found.cpu().double()).abs().max() if expected.numel() else 0.0
        assert torch.equal(expected, found.cpu()), f"tensor {number} is off by up to {off:g}"


def train(make: Make, kind: str, dtype: torch.dtype = torch.float32, optimizer: Optimizer = SGD) -> None:
    """Raise AssertionError unless a model trains on the device as on the CPU."""
    x = inputs(kind)
    assert_same(*(trained(make, x, device, dtype, optimizer) for device in ("cpu", "sim")))


def _named(name: str, function: Callable[[], None]) -> Callable[[], None]:
    function.__name__ = name
    return function


def _case(name: str, *arguments: Any, **options: Any) -> Callable[[], None]:
    return _named(name, lambda: train(*arguments, **options))


CASES = [
    *(_case(name, *model) for name, model in MODELS.items()),
    *(_case(f"{name}_float64", *MODELS[name], torch.float64) for name in ("mlp", "cnn", "encoder", "lstm", "gru")),
    *(_case(name, mlp, VECTORS, optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()),
]
