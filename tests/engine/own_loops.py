"""Loops that compute their own gradients, and the plain torch loops that they were, for the tests of all engines."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from paceline import Program
from paceline.callbacks import Callback

SAMPLES, BATCH = 96, 16

# Sums of the same products in another order, of 18 steps, in float64.
TOLERANCE = 1e-9


def equal(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless both have the same names, and values within the tolerance."""
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=tolerance, atol=tolerance)


def data() -> tuple[Tensor, Tensor]:
    """Return inputs and classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 3, (SAMPLES,), generator=generator)


def make_model() -> nn.Module:
    """Return a small model in float64; without BatchNorm, which would see the batches of one replica alone."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def loader(batch: int, epochs_seed: int = 5) -> DataLoader[Any]:
    """Return a loader that shuffles by a generator of its own."""
    generator = torch.Generator().manual_seed(epochs_seed)
    return DataLoader(TensorDataset(*data()), batch_size=batch, shuffle=True, generator=generator)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Callable[[], Iterable[Any]],
    epochs: int = 3,
    bound: float | None = None,
) -> None:
    """Train as people do: a scheduler, two losses, an option that changes, and gradients clipped at a bound.

    Where there is one, it has to bind: what clips nothing shows nothing.
    """
    clipped = 0
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    for epoch in range(epochs):
        for inputs, targets in batches():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            penalty = sum(parameter.square().sum() for parameter in model.parameters())
            loss.backward()
            (1e-3 * penalty).backward()
            if bound is not None:
                clipped += float(nn.utils.clip_grad_norm_(model.parameters(), bound)) > bound
            optimizer.step()
            scheduler.step()
        if epoch == 1:
            optimizer.param_groups[0]["weight_decay"] = 1e-2
    assert bound is None or clipped > 3


SGD = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
MAKERS = {"sgd": SGD, "adamw": ADAMW}


def plain(make: Callable[[Any], Optimizer], bound: float | None = None) -> dict[str, Tensor]:
    """Return what the plain torch loop trains, from the same A_0."""
    model = Program(model=make_model, optimizer=make).build()
    own = loader(BATCH)
    train(model, make(list(model.parameters())), lambda: own, bound=bound)
    return model.state_dict()


def loop(worker: Any) -> None:
    """Run the same loop on a worker; all replicas together see the batches of one process."""
    own = loader(BATCH // worker.replicas)
    train(worker.model, worker.optimizer, lambda: worker.data(own))


BOUND = 0.5
"""Of a gradient's norm: about half of the steps are clipped."""


def clipping_loop(worker: Any) -> None:
    """Run it on the only replica, whose own clipping is that of the update."""
    own = loader(BATCH)
    train(worker.model, worker.optimizer, lambda: worker.data(own), bound=BOUND)


class Gan(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)).double()
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


GAN_OPTIMIZERS = {
    "generator": functools.partial(torch.optim.Adam, lr=0.01, betas=(0.5, 0.9)),
    "discriminator": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5),
}


def train_gan(model: Gan, optimizers: Any, batches: Callable[[], Iterable[Any]], epochs: int = 2) -> None:
    """Train both: the discriminator twice a batch; noise is a function of the data, so that replicas can divide it."""
    bce = nn.functional.binary_cross_entropy_with_logits
    for _ in range(epochs):
        for real, _ in batches():
            noise = real[:, :4] * 3.0
            for _ in range(2):
                optimizers["discriminator"].zero_grad()
                fake = model.generator(noise).detach()
                for x, y in ((real, 1.0), (fake, 0.0)):
                    out = model.discriminator(x)
                    bce(out, torch.full_like(out, y)).backward()
                optimizers["discriminator"].step()
            optimizers["generator"].zero_grad()
            out = model.discriminator(model.generator(noise))
            bce(out, torch.ones_like(out)).backward()
            optimizers["generator"].step()


def plain_gan() -> dict[str, Tensor]:
    """Return what the plain torch loop trains."""
    model = Program(model=Gan, optimizer=GAN_OPTIMIZERS).build()
    assert isinstance(model, Gan)
    own = loader(BATCH)
    optimizers = {name: make(getattr(model, name).parameters()) for name, make in GAN_OPTIMIZERS.items()}
    train_gan(model, optimizers, lambda: own)
    return model.state_dict()


def gan_loop(worker: Any) -> None:
    """Run the same loop on a worker."""
    own = loader(BATCH // worker.replicas)
    train_gan(worker.model, worker.optimizers, lambda: worker.data(own))


def program(**fields: Any) -> Program:
    """Return a program with data and a loss, which Paceline's own steps need."""
    whole = {"model": make_model, "loss": nn.functional.cross_entropy, "optimizer": SGD, "train": data()}
    return Program(**(whole | {"batch_size": 8} | fields))


def batches_loop(worker: Any) -> None:
    """Make the step that ``worker.step(batch)`` makes, by hand."""
    model, optimizer = worker.model, worker.optimizer
    for batch in worker.batches():
        optimizer.zero_grad()
        worker.backward(nn.functional.cross_entropy(model(batch.input), batch.target))
        optimizer.step()


class LogKeeper(Callback):
    """Keeps what loops log."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, int, dict[str, float]]] = []

    def on_log(self, replica: int, step: int, values: Any, run: Any) -> None:
        self.logged.append((replica, step, values))


def reporting_loop(worker: Any) -> None:
    """Log after each step, and ask to end after the fifth of replica 1."""
    for step, batch in enumerate(worker.batches(), 1):
        worker.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(worker.model(batch.input), batch.target)
        loss.backward()
        worker.optimizer.step()
        worker.log({"loss": loss, "replica": worker.replica})
        if worker.replica == 1 and step == 5:
            worker.stop("five are enough")
