"""What is trained while it is disturbed: W1 to W4 of the scorecard, on the data sets' files or on random numbers.

A folder for ``data`` has ``mnist``, ``cifar10`` (with ``cifar-10-batches-py``) and ``tinyshakespeare`` in it.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import Program, Run
from paceline.datasets.cifar10 import cifar10
from paceline.datasets.mnist import mnist
from paceline.datasets.models import cnn
from paceline.datasets.shakespeare import LENGTH, Windows, next_character_loss, shakespeare, transformer

SAMPLES, CHARACTERS = 4096, 65
"""Of random data."""

Samples = tuple[Tensor, Tensor] | Windows


def perceptron(width: int) -> nn.Module:
    """Return the MLP of W1, 784-256-10 (203,530 parameters), or one of another width."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))


def large() -> nn.Module:
    """Return the model of W4: 25 M parameters, 100 MB, 300 MB with the two moments of Adam."""
    return nn.Sequential(nn.Linear(784, 3072), nn.ReLU(), nn.Linear(3072, 6800), nn.ReLU(), nn.Linear(6800, 250))


def workload(name: str, data: str | None = None, *, width: int = 256, samples: int | None = None) -> Program:
    """Return a workload, ``W1`` to ``W4``.

    Args:
        name: of the workload.
        data: folder of the data sets; None: random data of the same shapes.
        width: of the hidden layer of W1.
        samples: so many of the data; None: all.
    """
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    optimizer: Any = functools.partial(torch.optim.Adam, lr=1e-3)
    if name == "W1":
        model: Any = functools.partial(perceptron, width)
        train: Samples = _classes(784, 10) if data is None else mnist(data=Path(data, "mnist"), seed=0).train
    elif name == "W2":
        model = functools.partial(cnn, 3, 32)
        there = data is not None and Path(data, "cifar10", "cifar-10-batches-py").is_dir()
        train = cifar10(data=Path(str(data), "cifar10"), seed=0).train if there else _classes(3, 32, 32, 10)
    elif name == "W3":
        model, loss = functools.partial(transformer, CHARACTERS, 128, 4, 4), next_character_loss
        optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
        train = _text() if data is None else shakespeare(data=Path(data, "tinyshakespeare"), seed=0).train
    else:
        model, train = large, _classes(784, 250)
    if samples is not None and isinstance(train, Windows):
        train = Windows(train.tokens[: samples * train.length + 1], train.length)
    elif samples is not None:
        train = train[0][:samples], train[1][:samples]
    return Program(model=model, loss=loss, optimizer=optimizer, train=train, batch_size=32, name=name)


def with_indices(program: Program) -> Program:
    """Return a program of class labels with targets (class, number of the sample), of which the loss uses the first."""
    inputs, targets = program.train
    return replace(program, loss=_loss_of_first, train=(inputs, (targets, torch.arange(len(targets)))))


def _loss_of_first(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, target[0])


def samples_of(program: Program) -> int:
    """Return the number of samples of the training set."""
    train: Any = program.train
    return len(train[0]) if isinstance(train, tuple) else len(train)


def accuracy_of(run: Run, program: Program, data: str | None) -> float:
    """Return the share of MNIST's test set, or of random training data, whose classes the trained model predicts."""
    inputs, targets = program.train if data is None else mnist(data=Path(data, "mnist"), seed=0).test
    labels = targets[0] if isinstance(targets, tuple) else targets
    assert run.model is not None
    run.model.eval()
    with torch.no_grad():
        return float((run.model(inputs).argmax(1) == labels).double().mean())


def _classes(*shape: int) -> tuple[Tensor, Tensor]:
    """Return random inputs of all sizes but the last, which is the number of classes."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, *shape[:-1], generator=generator)
    return inputs, torch.randint(shape[-1], (SAMPLES,), generator=generator)


def _text() -> Windows:
    return Windows(
        torch.randint(CHARACTERS, (SAMPLES * LENGTH + 1,), generator=torch.Generator().manual_seed(1)), LENGTH
    )
