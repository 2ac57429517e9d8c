"""A small character transformer on one text, usually Shakespeare's, the ``input.txt`` of karpathy/char-rnn."""

import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import Dataset

from paceline.core.errors import InputError
from paceline.datasets.files import find_files, read_bytes
from paceline.program import Program, accuracy

# Characters in one window.
LENGTH = 64
_SHORTEST = 10 * (LENGTH + 1)


def shakespeare(*, data: Path | None, seed: int) -> Program:
    """Return a text under two transformer blocks of width 64, which predict each next character.

    AdamW, learning rate 0.001, batch 32.

    Args:
        data: folder of ``input.txt``, in UTF-8; its first 90 % are the training set.
        seed: seed of A_0 and the data order.

    Raises:
        InputError: the file is absent, no UTF-8, or too short.
    """
    (path,) = find_files("shakespeare", data, ("input.txt",), (".",))
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text: {error}; write it in UTF-8") from error
    if len(text) < _SHORTEST:
        raise InputError(
            f"{path} has {len(text)} characters, too few for windows of {LENGTH} in the last 10 % of it; "
            f"give it at least {_SHORTEST}"
        )
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([index[character] for character in text])
    split = len(tokens) * 9 // 10
    return Program(
        model=functools.partial(transformer, len(index)),
        loss=next_character_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        train=Windows(tokens[:split], LENGTH),
        test=Windows(tokens[split:], LENGTH),
        batch_size=32,
        seed=seed,
        metrics={"accuracy": accuracy},
        name="shakespeare",
    )


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Text as (characters, next characters), [length] each: consecutive views of ``tokens``.

    >>> windows = Windows(torch.arange(10), length=4)
    >>> len(windows), windows[1]
    (2, (tensor([4, 5, 6, 7]), tensor([5, 6, 7, 8])))
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        # The last window's target needs one character more.
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        return self.tokens[start : start + self.length], self.tokens[start + 1 : start + self.length + 1]


def next_character_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of scores [n, length, vocabulary] to characters [n, length], in nats, mean over all."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


def transformer(vocabulary: int, width: int = 64, heads: int = 4, blocks: int = 2) -> nn.Sequential:
    """Return a model: characters [n, length <= LENGTH] -> scores of the next, [n, length, vocabulary]."""
    return nn.Sequential(
        Embed(vocabulary, width),
        *(Block(width, heads) for _ in range(blocks)),
        nn.LayerNorm(width),
        nn.Linear(width, vocabulary),
    )


class Embed(nn.Module):
    """Embedding of character and position: [n, length] -> [n, length, width]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.02)

    def forward(self, characters: Tensor) -> Tensor:
        embedded: Tensor = self.character(characters)
        return embedded + self.position[: characters.shape[1]]


class Block(nn.Module):
    """Causal attention and a perceptron, each after a norm and with a skip connection: [n, length, width] kept."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        projected = self.qkv(self.norm1(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1))
        attention: Tensor = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        change: Tensor = self.perceptron(self.norm2(x))
        return x + change
