"""What shards can't do, refused before the first step with the words to write instead."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import InputError
from paceline.api.train import check
from paceline.core.errors import PacelineError
from paceline.engine.local.engine import LocalEngine
from paceline.optim.lamb import Lamb
from paceline.optim.lars import Lars
from paceline.replica.base import Batch
from paceline.replica.flat_state import FlatLayout
from paceline.replica.tensor.optimizer_check import refuse_unless_elementwise
from paceline.replica.tensor.placements import OnRank, Shard, even_sizes
from paceline.replica.tensor.placements import Placement as Lies
from paceline.replica.tensor.prepare import plan_program
from tests.engine import programs

# ------------------------------------------------------------------------------------------------------- the strategy


def refused(match: str, strategy: str, engine: str = "local") -> None:
    with pytest.raises(InputError, match=match):
        check(programs.program(), strategy, engine=engine, steps=1)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("stages=2 schedule=zero-bubble", "schedule=zero-bubble splits the backward pass .* write schedule=1f1b"),
        ("stages=2 schedule=pipedream micro_batches=1", "shards of such stages are not built yet; write schedule=1f1b"),
        (
            "stages=2 recompute=all",
            "recompute=all cuts a stage into pieces.*shards=2 divide; write recompute=boundaries",
        ),
        ("aggregation=hogwild", "aggregation=hogwild.*: replicas write one A in place.*write aggregation=asynchronous"),
    ],
)
def test_what_does_not_go_with_shards(words: str, match: str) -> None:
    refused(match, f"shards=2 {words}")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("compression=bf16", "compression=bf16 is about what whole replicas send .* leave compression out"),
        ("shard_optimizer=true", "shard_optimizer=True divides .* shards=2 no two have; write replicas=2, or leave"),
        ("shard_parameters=true", "shard_parameters=True is about .* leave shard_parameters out"),
    ],
)
def test_what_does_not_go_with_shards_under_torchrun(monkeypatch: pytest.MonkeyPatch, words: str, match: str) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    check(programs.program(), "shards=2", engine="distributed", steps=1)
    refused(match, f"shards=2 {words}", "distributed")


# ---------------------------------------------------------------------------------------------------------- the model


def refused_model(match: str, shards: int = 2, **fields: Any) -> None:
    program = programs.program(**fields)
    inputs, targets = program.train
    with pytest.raises(InputError, match=match):
        plan_program(program, program.build(), Batch(inputs[:4], targets[:4], 4), shards)


def test_nothing_can_be_divided_by_so_many() -> None:
    refused_model("shards=9: nothing of Sequential can be divided into 9; write fewer shards", shards=9)


def test_a_run_says_so_too() -> None:
    """Once, as the user's error, from all ranks."""
    program = programs.program(optimizer=functools.partial(Lamb, lr=0.01))
    with LocalEngine() as engine, pytest.raises(InputError, match=r"shards=2: each shard steps .* Lamb looks at more"):
        paceline.train(program, "shards=2", engine=engine, steps=1, progress=False)


class Doubled(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Through(nn.Module):
    """One layer, then any function, then another layer."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self._function = nn.Linear(6, 8), nn.Linear(8, 3), function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._function(self.first, x))


def doubled(layer: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = Doubled.apply(layer(x))  # type: ignore[no-untyped-call]
    return found


def test_a_function_whose_backward_a_graph_loses() -> None:
    refused_model(r"Doubled \(.*\), a torch.autograd.Function, of which", model=functools.partial(Through, doubled))


def again(layer: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    given = x + next(layer.parameters()).sum()  # torch warns of a checkpoint of what has no gradient
    found: Tensor = checkpoint(layer, given, use_reentrant=reentrant)
    return found


@pytest.mark.parametrize(
    ("reentrant", "match"), [(False, "Through calls .*checkpoint.*"), (True, "use_reentrant=True")]
)
def test_a_checkpoint(reentrant: bool, match: str) -> None:
    function = functools.partial(again, reentrant=reentrant)
    refused_model(match, model=functools.partial(Through, function))


def by_value(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) if float(x.detach().sum()) > 0 else torch.tanh(layer(x))


def test_a_model_that_decides_by_values() -> None:
    refused_model(
        "Through can't be captured as a graph: torch.export stopped at .*float",
        model=functools.partial(Through, by_value),
    )


def no_tensor(output: Tensor, target: Tensor) -> float:
    return float(nn.functional.cross_entropy(output, target))


def test_a_loss_that_is_no_tensor() -> None:
    with pytest.raises(PacelineError, match="loss"):
        check(programs.program(loss=no_tensor), "shards=2", engine="local", steps=1)


# ------------------------------------------------------------------------------------------------------ the optimizer


class Noisy(Optimizer):
    """Unknown to the library: it adds noise, as Langevin dynamics do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * (parameter.grad + torch.randn_like(parameter)))


class OfAll(Optimizer):
    """Its rate depends on all gradients together."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        total = sum(float(p.grad.square().sum()) for p in parameters)
        for parameter in parameters:
            parameter.sub_(parameter.grad / (1 + total))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


LIES: dict[str, Lies] = {
    "0.weight": Shard(-2, even_sizes(8, 2)),
    "0.bias": Shard(-1, even_sizes(8, 2)),
    "2.weight": Shard(-1, even_sizes(8, 2)),
    "2.bias": OnRank(0),
}


def wide_ones_decay(parameters: list[nn.Parameter]) -> Optimizer:
    wide = [p for p in parameters if p.shape[0] == 8]
    rest = [p for p in parameters if p.shape[0] != 8]
    return torch.optim.AdamW([{"params": wide, "weight_decay": 0.5}, {"params": rest}], lr=0.1)


ELEMENTWISE: dict[str, Any] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "groups": wide_ones_decay,
    "Lamb of vectors": functools.partial(Lamb, lr=0.1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_that_treat_each_element_alone(name: str) -> None:
    lies = LIES if name != "Lamb of vectors" else {"2.bias": OnRank(0)}
    refuse_unless_elementwise(ELEMENTWISE[name], FlatLayout.of(net()), lies, 2)


WHOLE: dict[str, Any] = {
    "Lamb": functools.partial(Lamb, lr=0.1),
    "Lars": functools.partial(Lars, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
    "Noisy": Noisy,
    "OfAll": OfAll,
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("shards", [2, 3])
def test_optimizers_that_look_at_whole_tensors(name: str, shards: int) -> None:
    lies = {key: Shard(how.dim, even_sizes(8, shards)) if isinstance(how, Shard) else how for key, how in LIES.items()}
    with pytest.raises(
        InputError,
        match=rf"shards={shards}: each shard steps on its part of a tensor, but {name} looks at more of \S+ than one "
        r"element at a time; write shards=1, or an optimizer that treats each element alone, as torch.optim.AdamW does",
    ):
        refuse_unless_elementwise(WHOLE[name], FlatLayout.of(net()), lies, shards)


def test_an_optimizer_that_wants_a_closure() -> None:
    with pytest.raises(InputError, match=r"but LBFGS fails on a step: .*; write shards=1, or an optimizer that"):
        refuse_unless_elementwise(torch.optim.LBFGS, FlatLayout.of(net()), LIES, 2)


def matrices_alone() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_looks_at_whole_matrices() -> None:
    lies = {"0.weight": LIES["0.weight"], "1.weight": LIES["2.weight"]}
    with pytest.raises(InputError, match=r"but Muon looks at more of 0\.weight than one element at a time"):
        refuse_unless_elementwise(torch.optim.Muon, FlatLayout.of(matrices_alone()), lies, 2)


def test_trying_leaves_the_random_numbers_alone() -> None:
    layout, before = FlatLayout.of(net()), torch.random.get_rng_state()
    refuse_unless_elementwise(torch.optim.AdamW, layout, LIES, 2)
    assert torch.equal(torch.random.get_rng_state(), before)
