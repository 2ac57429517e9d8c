"""Some parameters have no gradient: all shards send the same in backward, or none does."""

import pytest
import torch
from torch import Tensor, nn

from paceline.replica.tensor.base import OpCall, OpStrategy, rule_of
from paceline.replica.tensor.rules.linear import BIAS_RANK
from tests.replica.tensor.cases import forced, looked_at, possible, same

K = 2


class Two(nn.Module):
    """Something before a layer that is cut by rows, and a layer behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.rand(6))
        self.layer, self.last = layer, nn.Linear(5, 7)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * x
        x = self.layer(x) if isinstance(self.layer, nn.Linear) else self.layer(x.unsqueeze(-1)).squeeze(-1)
        return self.last(x.tanh())  # type: ignore[no-any-return]


LAYERS = {"linear": lambda: nn.Linear(6, 5), "conv1d": lambda: nn.Conv1d(6, 5, 1)}
FROZEN = {
    "nothing": [],
    "what is before": ["scale"],
    "the weight": ["layer.weight"],
    "all before": ["scale", "layer.weight", "layer.bias"],
    "all but the bias": ["scale", "layer.weight"],
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_whose_terms_are_summed(layer: str, frozen: str) -> None:
    model, x = Two(LAYERS[layer]()), torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for name in FROZEN[frozen]:
        model.get_parameter(name).requires_grad_(False)
    found = looked_at(model, x, K)
    first, last = (call for call in found.calls.values() if _weighed(call))
    summed = [strategy for strategy in possible(first) if BIAS_RANK in strategy.inputs]
    assert bool(summed) is (frozen != "all but the bias"), "shard 0 alone would have a gradient to send"
    for strategy in summed:
        same(
            forced(found, K, {first.node: strategy, last.node: _columns(last)}), model, x, f"{layer}, frozen: {frozen}"
        )


def _weighed(call: OpCall) -> bool:
    return any("weight" in (value.parameter or "") for value in call.inputs)


def _columns(call: OpCall) -> OpStrategy:
    rule = rule_of(call.target)
    assert rule is not None
    return next(
        strategy for strategy in rule.strategies(call, [frozenset()] * len(call.inputs)) if strategy.name == "column"
    )
