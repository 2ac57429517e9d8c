"""Recurrent layers stay whole, and say why; what is before and after them is sharded, and all of it trains exactly."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.replica.tensor.placements import PARTIAL_GRAD, Shard
from paceline.replica.tensor.rewrite import rewrite_for_shard
from paceline.replica.tensor.sharding_plan import ShardingPlan
from paceline.replica.tensor.sharding_report import sharding_report
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.shard_rules import ShardRules
from tests.replica.tensor.cases import own, put_together
from tests.replica.tensor.shard_harness import divided
from tests.replica.tensor.threads import together

WORDS, STEPS = 13, 5

Kind = type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]


class Words(nn.Module):
    """Embedding, recurrent layers, logits."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(WORDS, 6), kind(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        made: Tensor = self.head(self.recurrent(self.embedding(words))[0])
        return made


def seeded(kind: Kind) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(19)
        return Words(kind).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    drawn = [torch.randint(WORDS, (3, 8), generator=draw) for _ in range(STEPS)]
    return [(each[:, :-1], each[:, 1:]) for each in drawn]


def trained(
    module: nn.Module, forward: Callable[[Tensor], Tensor], summed: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Its parameters after some steps."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    for words, following in batches():
        optimizer.zero_grad()
        cross_entropy(forward(words).flatten(0, 1), following.flatten()).backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                parameter.grad = summed(name, parameter.grad)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def by_shards(made: ShardingPlan) -> list[Mapping[str, Tensor]]:
    def work(shards: TPCollectives) -> Mapping[str, Tensor]:
        module = own(rewrite_for_shard(made, shards)).module

        def summed(name: str, gradient: Tensor) -> Tensor:
            shared = made.parameters[name] == PARTIAL_GRAD
            return shards.all_reduce(gradient, name) if shared else gradient

        return trained(module, lambda words: module(*made.graph.captured.flatten(words))[0], summed)

    return together(made.shards, work)[0]


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_model_with_one_trains_as_one_process_does(kind: Kind, k: int) -> None:
    model = seeded(kind)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    made = divided(model, batches()[0][0], k).plan
    assert isinstance(made.parameters["embedding.weight"], Shard)
    assert isinstance(made.parameters["head.weight"], Shard)
    shards = by_shards(made)
    for name, expected in trained(model, model, lambda _, gradient: gradient).items():
        found = put_together([shard[name] for shard in shards], made.parameters[name], expected, terms=False)
        # Adam divides by √v, which may be small: a rounding of 1e-16 grows to about 1e-10 in these steps.
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10, msg=lambda why, name=name: f"{name}: {why}")
        assert not torch.equal(expected, before[name]), f"{name} moved"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_table_says_why_it_is_whole(kind: Kind) -> None:
    made = divided(seeded(kind), batches()[0][0], 2).plan
    (row,) = (row for row in sharding_report(made, ShardRules({})).rows if row.module == "recurrent" and row.parameters)
    assert (row.cut, row.why_whole) == ("whole", "its hidden units would have to be gathered in every time step")
