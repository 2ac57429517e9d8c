"""How long the search of a sharding plan takes, in CPU time: models are small, since only their graphs matter.

python benchmarks/tensor/search.py              # all models
python benchmarks/tensor/search.py gpt2-12      # some of them
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from paceline.replica.capture.capture import capture
from paceline.replica.tensor import rules
from paceline.replica.tensor.functionalize import functionalize
from paceline.replica.tensor.graph_ops import OperatorGraph, operator_graph
from paceline.replica.tensor.sharding_plan import plan_sharding

assert rules, "importing them registers them"

SHARDS = 2

TOKENS = (4, 7)


class WithLoss(nn.Module):
    """A model of transformers with its cross entropy, for tokens or for images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        decoder = {"decoder_input_ids": target} if hasattr(self.model, "decoder") else {}
        return F.cross_entropy(self.model(x, **decoder).logits.flatten(0, -2), target.flatten())


def gpt2(layers: int) -> tuple[nn.Module, Any]:
    config = GPT2Config(n_layer=layers, n_head=4, n_embd=32, n_positions=16, vocab_size=64, use_cache=False)
    return GPT2LMHeadModel(config), (torch.zeros(TOKENS, dtype=torch.long), torch.zeros(TOKENS, dtype=torch.long))


def t5(layers: int) -> tuple[nn.Module, Any]:
    config = T5Config(
        num_layers=layers, num_decoder_layers=layers, d_model=32, d_ff=64, num_heads=4, d_kv=8, vocab_size=64,
        use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    inputs = (torch.zeros(TOKENS, dtype=torch.long), torch.zeros((4, 6), dtype=torch.long))
    return T5ForConditionalGeneration(config), inputs


def resnet() -> tuple[nn.Module, Any]:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[32, 64, 128, 256], num_labels=10)  # ResNet-50's depths
    return ResNetForImageClassification(config), (torch.zeros(4, 3, 64, 64), torch.zeros(4, dtype=torch.long))


def swin() -> tuple[nn.Module, Any]:
    config = SwinConfig(image_size=64, patch_size=2, embed_dim=24, window_size=4, num_labels=10)  # Swin-T's depths
    return SwinForImageClassification(config), (torch.zeros(4, 3, 64, 64), torch.zeros(4, dtype=torch.long))


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "t5-2": partial(t5, 2),
    "gpt2-12": partial(gpt2, 12),
    "gpt2-24": partial(gpt2, 24),
    "t5-24": partial(t5, 24),
    "resnet-50": resnet,
    "swin-t": swin,
}


def graph_of(name: str) -> OperatorGraph:
    """Return the operators of a model with its loss."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    captured = capture(WithLoss(model), inputs, operators=True, others=())
    functionalize(captured.module)
    return operator_graph(captured, SHARDS, captured.flatten(inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | operators | CPU seconds | plan |\n|---|---|---|---|", flush=True)
    for name in options.models:
        graph, seconds = graph_of(name), list[float]()
        for _ in range(options.repeats):
            began = time.process_time()
            plan = plan_sharding(graph, SHARDS)
            seconds.append(time.process_time() - began)
        times = f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"| {name} | {len(graph.calls)} | {times} | {plan.cost} |", flush=True)


if __name__ == "__main__":
    main()
