"""What is trained, on random data: speed does not hang on it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    """784-2048-2048-10: 5.8M parameters, so communication is the bound."""
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )  # fmt: skip


def cnn() -> nn.Module:
    """The MNIST network of the Smooth Switch paper: 22k parameters, so computing is the bound."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Two layers of width 128 over 32 characters: 0.4M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(65, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 65)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(text)).mean(1))
        return logits


def _images(*shape: int) -> Callable[[int], Data]:
    return lambda samples: (torch.randn(samples, *shape), torch.randint(10, (samples,)))


def _text(samples: int) -> Data:
    return torch.randint(65, (samples, 32)), torch.randint(65, (samples,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Data]]] = {
    "mlp": (mlp, _images(784)),
    "cnn": (cnn, _images(1, 28, 28)),
    "transformer": (Transformer, _text),
}
"""Name -> what makes the model, and what makes so many samples."""
