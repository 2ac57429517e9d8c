"""Losses whose target is a number, which mostly have no derivative by it, captured with the model and sharded."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Program
from paceline.replica.base import Batch
from paceline.replica.tensor.placements import Shard
from paceline.replica.tensor.prepare import plan_program
from tests.replica.tensor.cases import same

OUTPUTS = 6
WEIGHT = torch.linspace(0.5, 1.5, OUTPUTS, dtype=torch.float64)


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


SIGNS, BITS = _numbers(5, OUTPUTS).sign(), (_numbers(5, OUTPUTS) > 0).double()
PROBABILITIES = _numbers(5, OUTPUTS).softmax(-1)


def kl(x: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(x.log_softmax(-1), target, reduction="batchmean")


def bce(x: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid(), target)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "bce with logits": (F.binary_cross_entropy_with_logits, BITS),
    "bce with logits, weighed": (partial(F.binary_cross_entropy_with_logits, weight=WEIGHT), BITS),
    "bce with logits, positives weighed": (partial(F.binary_cross_entropy_with_logits, pos_weight=WEIGHT), BITS),
    "bce": (bce, BITS),
    "mse": (F.mse_loss, _numbers(5, OUTPUTS)),
    "l1": (F.l1_loss, _numbers(5, OUTPUTS)),
    "soft margin": (F.soft_margin_loss, SIGNS),
    "hinge embedding": (F.hinge_embedding_loss, SIGNS),
    "kl": (kl, PROBABILITIES),
    "cross entropy of probabilities": (F.cross_entropy, PROBABILITIES),
    "multi-label soft margin": (F.multilabel_soft_margin_loss, BITS),
    "multi-label soft margin, weighed": (partial(F.multilabel_soft_margin_loss, weight=WEIGHT), BITS),
    "poisson": (F.poisson_nll_loss, BITS),
}


class Joined(nn.Sequential):
    """The model and its loss."""

    loss: Callable[[Tensor, Tensor], Tensor]

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(super().forward(x), target)


@pytest.mark.parametrize("name", LOSSES)
def test_shards_are_the_model(name: str) -> None:
    loss, target = LOSSES[name]
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, OUTPUTS)).double()
    program = Program(model=lambda: model, loss=loss, optimizer=torch.optim.SGD, train=(_numbers(5, 4), target))
    _, made = plan_program(program, model, Batch(_numbers(5, 4), target, 5), 2)
    assert isinstance(made.parameters["2.weight"], Shard)
    joined = Joined(*model)
    joined.loss = loss
    same(made, joined, (_numbers(5, 4), target), name)
