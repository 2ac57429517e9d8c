"""A loss has to be a mean over samples, whatever the form of the model's output."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Program
from paceline.core.errors import InputError
from paceline.replica.base import Batch
from paceline.replica.pipeline.loss_check import check_loss

SAMPLES = 8


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


class TimeMajor(nn.Module):
    """Samples are along dim 1 of its output, as CTC takes it; in training it drops some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.drop, self.out = nn.GRU(5, 8), nn.Dropout(0.5), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.rnn(x.transpose(0, 1))[0])).log_softmax(-1)  # type: ignore[no-any-return]


def ctc(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    samples = output.size(1)
    lengths = torch.full((samples,), len(output)), torch.full((samples,), target.size(1))
    return F.ctc_loss(output, target, *lengths, reduction=reduction)


class Pairs(nn.Module):
    """A number for each pair of samples, as CLIP has it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.normalize(self.one(x), dim=-1) @ F.normalize(self.other(y), dim=-1).t()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    own = torch.arange(len(output))
    return (F.cross_entropy(output, own) + F.cross_entropy(output.t(), own)) / 2


class Normed(nn.Sequential):
    """Each micro-batch is normalised by itself, which is no fault of the loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


def checked(model: nn.Module, loss: Callable[..., Tensor], inputs: object, target: Tensor, count: int = 4) -> None:
    program = Program(lambda: model, loss, torch.optim.SGD, train=(torch.zeros(1), torch.zeros(1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        check_loss(program, model, Batch(inputs, target, SAMPLES), count)
    finally:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert model.training


@pytest.mark.parametrize("length", [10, SAMPLES])
def test_samples_along_another_dim(length: int) -> None:
    inputs, target = numbers(SAMPLES, length, 5), torch.arange(SAMPLES * 3).view(SAMPLES, 3) % 5 + 1
    checked(TimeMajor(), ctc, inputs, target)
    with pytest.raises(InputError, match=r"its 4 micro-batches .* it is no mean over samples .* or micro_batches=1"):
        checked(TimeMajor(), functools.partial(ctc, reduction="sum"), inputs, target)


def test_a_loss_over_pairs_of_samples_is_no_mean_over_samples() -> None:
    inputs = numbers(SAMPLES, 6), numbers(SAMPLES, 6).flip(0)
    with pytest.raises(InputError, match=r"its 4 micro-batches .* it is no mean over samples .* or micro_batches=1"):
        checked(Pairs(), contrastive, inputs, torch.zeros(SAMPLES))
    checked(Pairs(), contrastive, inputs, torch.zeros(SAMPLES), count=1)


@pytest.mark.parametrize("count", [4, SAMPLES])
def test_what_a_model_does_with_a_batch_is_no_fault_of_the_loss(count: int) -> None:
    checked(Normed(), F.mse_loss, numbers(SAMPLES, 6), numbers(SAMPLES, 4), count)
    with pytest.raises(InputError, match="it is no mean over samples"):
        checked(Normed(), nn.MSELoss(reduction="sum"), numbers(SAMPLES, 6), numbers(SAMPLES, 4), count)


def test_an_error_of_the_loss_names_the_micro_batch() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.view(SAMPLES, 2, 2), target.view(SAMPLES, 2, 2))

    match = r"the loss was given a micro-batch of 2 of the first batch's 8 samples, and failed: RuntimeError"
    with pytest.raises(InputError, match=match):
        checked(Normed(), loss, numbers(SAMPLES, 6), numbers(SAMPLES, 4))
