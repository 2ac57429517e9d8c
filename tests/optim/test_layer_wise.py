"""LARS and LAMB against the formulas of their papers, in float64."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import Lamb, Lars
from paceline.core.errors import InputError
from tests.optim.literal import LiteralLamb, LiteralLars

STEPS = 12

ROUNDING = 1e-13
"""12 steps of some ten roundings of 1e-16, and norms of up to 40 terms; nothing is divided by what may be nearly 0."""

PAIRS: dict[str, tuple[type[Optimizer], type[Optimizer], dict[str, Any]]] = {
    "lars": (Lars, LiteralLars, {"lr": 2.0}),
    "lars without momentum": (Lars, LiteralLars, {"lr": 2.0, "momentum": 0.0}),
    "lars with decay": (Lars, LiteralLars, {"lr": 2.0, "weight_decay": 0.1, "trust": 0.02}),
    "lars with nesterov": (Lars, LiteralLars, {"lr": 2.0, "weight_decay": 0.1, "nesterov": True}),
    "lars but for vectors": (Lars, LiteralLars, {"lr": 0.1, "weight_decay": 0.1, "exclude_vectors": True}),
    "lamb": (Lamb, LiteralLamb, {"lr": 0.01}),
    "lamb with decay": (Lamb, LiteralLamb, {"lr": 0.01, "weight_decay": 0.1}),
    "lamb of other betas": (Lamb, LiteralLamb, {"lr": 0.01, "betas": (0.5, 0.6), "eps": 1e-3}),
    "lamb without memory": (Lamb, LiteralLamb, {"lr": 0.01, "betas": (0.0, 0.0)}),
    "lamb but for vectors": (Lamb, LiteralLamb, {"lr": 0.01, "weight_decay": 0.1, "exclude_vectors": True}),
}

BOTH = [(Lars, {"lr": 2.0, "weight_decay": 0.1}), (Lamb, {"lr": 0.01, "weight_decay": 0.1})]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """A matrix, a vector, a number, a vector that begins at 0, and one that never has a gradient."""
    generator = torch.Generator().manual_seed(1)
    shapes: list[tuple[int, ...]] = [(5, 8), (8,), (), (8,), (3,)]
    made = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]
    made[3].data.zero_()
    return made


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    scales = (1e3, 1.0, 1e-3, 1.0)
    shapes: list[tuple[int, ...]] = [(5, 8), (8,), (), (8,)]
    return [s * torch.randn(n, generator=generator, dtype=torch.float64) for s, n in zip(scales, shapes, strict=True)]


def walk(optimizer: Optimizer, targets: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(targets, gradients(step), strict=False):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def same(found: list[nn.Parameter], expected: list[nn.Parameter], bound: float = ROUNDING) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", PAIRS)
def test_it_is_the_formula_of_the_paper(name: str) -> None:
    ours, literal, options = PAIRS[name]
    found, expected, start = parameters(), parameters(), parameters()
    walk(ours(found, **options), found, range(STEPS))
    walk(literal(expected, **options), expected, range(STEPS))
    same(found, expected)
    assert not any(torch.equal(f, s) for f, s in zip(found[:4], start[:4], strict=True))
    assert torch.equal(found[4], start[4])


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_groups_have_options_of_their_own(name: str) -> None:
    ours, literal, options = PAIRS[name]
    found, expected = parameters(), parameters()
    for make, targets in ((ours, found), (literal, expected)):
        groups = [
            {"params": targets[:1], "weight_decay": 0.2},
            {"params": targets[1:], "lr": 0.001, "exclude_vectors": True},
        ]
        walk(make(groups, **options), targets, range(STEPS))
    same(found, expected)


@pytest.mark.parametrize(("make", "options"), BOTH)
def test_a_gradient_that_comes_and_goes_counts_its_own_steps(make: Any, options: dict[str, Any]) -> None:
    literal = {Lars: LiteralLars, Lamb: LiteralLamb}[make]
    found, expected = parameters(), parameters()
    for targets, optimizer in ((found, make(found, **options)), (expected, literal(expected, **options))):
        for step in range(6):
            for i, gradient in enumerate(gradients(step)):
                targets[i].grad = None if (step + i) % 3 == 0 else gradient
            optimizer.step()
    same(found, expected)


@pytest.mark.parametrize(("make", "options"), BOTH)
def test_a_gradient_of_zeros_is_no_division_by_zero(make: Any, options: dict[str, Any]) -> None:
    literal = {Lars: LiteralLars, Lamb: LiteralLamb}[make]
    found, expected = parameters(), parameters()
    for targets, optimizer in ((found, make(found, **options)), (expected, literal(expected, **options))):
        for step in range(6):
            for parameter, gradient in zip(targets, gradients(step), strict=False):
                parameter.grad = gradient * (step % 2)
            optimizer.step()
    same(found, expected)
    assert all(torch.isfinite(parameter).all() for parameter in found)


@pytest.mark.parametrize(("make", "options"), BOTH)
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_it_goes_on_from_its_state(make: Any, options: dict[str, Any], how: str) -> None:
    straight, cut = parameters(), parameters()
    walk(make(straight, **options), straight, range(STEPS))
    first = make(cut, **options)
    walk(first, cut, range(5))
    if how == "state_dict":
        resumed = make(cut, **options | {"lr": 9.0})
        resumed.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    else:
        resumed = pickle.loads(pickle.dumps(first)) if how == "pickle" else copy.deepcopy(first)
        cut = resumed.param_groups[0]["params"]
    walk(resumed, cut, range(5, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(straight, cut, strict=True))


@pytest.mark.parametrize(("make", "options"), BOTH)
def test_parameters_of_several_types_at_once(make: Any, options: dict[str, Any]) -> None:
    literal = {Lars: LiteralLars, Lamb: LiteralLamb}[make]
    found, expected = parameters(), parameters()
    found[1] = nn.Parameter(found[1].detach().float())
    walk(make(found, **options), found, range(STEPS))
    walk(literal(expected, **options), expected, range(STEPS))
    same([found[0], *found[2:]], [expected[0], *expected[2:]])
    # 12 steps of a dozen roundings of 6e-8.
    torch.testing.assert_close(found[1].double(), expected[1].double(), rtol=1e-5, atol=1e-5)
    assert found[1].dtype == torch.float32


@pytest.mark.parametrize(("make", "options"), BOTH)
def test_a_closure_computes_the_loss_with_gradients(make: Any, options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight], **options)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (weight**2).sum()
        value.backward()
        return value

    assert optimizer.step(loss).item() == 3.0
    assert optimizer.step(loss).item() < 3.0


@pytest.mark.parametrize(("make", "options"), BOTH)
def test_nothing_to_step_on_is_no_error(make: Any, options: dict[str, Any]) -> None:
    idle = parameters()
    make(idle, **options).step()
    same(idle, parameters(), 0.0)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Lars, {"lr": -1.0}, "lr=-1.0, but it must be 0 or above; write lr=1.0"),
        (Lars, {"lr": 1.0, "momentum": 1.0}, "momentum=1.0, but it must be from 0 to below 1; write momentum=0.9"),
        (Lars, {"lr": 1.0, "momentum": 0.0, "nesterov": True}, "above 0 with nesterov; write momentum=0.9"),
        (Lars, {"lr": 1.0, "trust": 0.0}, "trust=0.0, but it must be above 0; write trust=0.001"),
        (Lars, {"lr": 1.0, "weight_decay": -0.1}, "weight_decay=-0.1"),
        (Lamb, {"lr": float("nan")}, "lr=nan"),
        (Lamb, {"betas": (1.0, 0.9)}, r"betas\[0\]=1.0"),
        (Lamb, {"betas": (0.9, -0.1)}, r"betas\[1\]=-0.1"),
        (Lamb, {"eps": -1e-6}, "eps=-1e-06, but it must be 0 or above; write eps=1e-6"),
        (Lamb, {"weight_decay": -1}, "weight_decay=-1"),
    ],
)
def test_what_no_optimizer_can_be_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(parameters(), **options)


@pytest.mark.parametrize(("make", "options"), BOTH)
def test_sparse_gradients_are_refused(make: Any, options: dict[str, Any]) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(InputError, match=r"shape \(5, 3\) has a sparse gradient"):
        make(table.parameters(), **options).step()
