"""L-BFGS by evaluations against torch's, which calls for them, in float64."""

import copy
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.optim import LBFGS

ROUNDING = 1e-10
"""20 iterations whose products are of some hundred terms; a line search may amplify roundings by a few digits."""

Loss = Callable[[list[nn.Parameter]], Tensor]


def rosenbrock(parameters: list[nn.Parameter]) -> Tensor:
    x = torch.cat([p.reshape(-1) for p in parameters])
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def logistic(parameters: list[nn.Parameter]) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn((200, 12), generator=draw, dtype=torch.float64) * torch.logspace(-1, 1, 12, dtype=torch.float64)
    y = (torch.rand(200, generator=draw, dtype=torch.float64) < torch.sigmoid(x[:, 0] - 0.1 * x[:, 11])).double()
    weight = torch.cat([p.reshape(-1) for p in parameters])
    return nn.functional.binary_cross_entropy_with_logits(x @ weight, y) + 1e-3 * weight.square().sum()


def stiff(parameters: list[nn.Parameter]) -> Tensor:
    """Its first trials are far too long and far too short, so that line searches bracket, extend and zoom."""
    x = torch.cat([p.reshape(-1) for p in parameters])
    scale = torch.logspace(-3, 3, len(x), dtype=torch.float64)
    return (scale * (x - 1) ** 2).sum() + torch.cos(3 * x).sum() + 5 * torch.log1p((x**2).sum())


PROBLEMS: dict[str, Loss] = {"rosenbrock": rosenbrock, "logistic": logistic, "stiff": stiff}


def start() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64)) for shape in ((2, 4), (3,), ())]


def closure(optimizer: torch.optim.Optimizer, loss: Loss, parameters: list[nn.Parameter]) -> Callable[[], Tensor]:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        value = loss(parameters)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    return evaluate


def torchs(loss: Loss, iterations: int, **options: Any) -> tuple[list[nn.Parameter], int]:
    """Parameters after so many iterations of torch's, and how many evaluations they took."""
    parameters = start()
    kept = {"line_search_fn": "strong_wolfe", "max_iter": iterations, "max_eval": 10000, "history_size": 10}
    optimizer = torch.optim.LBFGS(parameters, **kept | options)
    optimizer.step(closure(optimizer, loss, parameters))
    return parameters, optimizer.state[parameters[0]]["func_evals"]


@pytest.mark.parametrize("history", [1, 3, 10])
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_makes_torchs_iterations_with_as_many_evaluations(name: str, history: int) -> None:
    parameters = start()
    optimizer, reached = LBFGS(parameters, history_size=history), dict[int, tuple[int, list[Tensor]]]()
    evaluate = closure(optimizer, PROBLEMS[name], parameters)
    for evaluations in range(1, 200):
        optimizer.step(evaluate)
        state = [optimizer.state[p] for p in parameters]
        reached.setdefault(state[0]["iteration"] - 1, (evaluations, [each["x"].clone() for each in state]))
        if len(reached) > 20:
            break
    for iterations, (evaluations, x) in reached.items():
        if iterations:
            expected, theirs = torchs(PROBLEMS[name], iterations, history_size=history)
            assert evaluations == theirs
            torch.testing.assert_close(x, [p.data for p in expected], rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("name", ["rosenbrock", "logistic"])
def test_it_finds_the_optimum(name: str) -> None:
    """Within 1e-10: that of Rosenbrock's is known, that of the other is where the gradient is nothing."""
    parameters = start()
    optimizer = LBFGS(parameters, history_size=20, tolerance_grad=1e-12, tolerance_change=0.0)
    evaluate = closure(optimizer, PROBLEMS[name], parameters)
    for _ in range(300):
        optimizer.step(evaluate)
    optimizer.finish()
    evaluate()
    if name == "rosenbrock":
        assert all(torch.allclose(p, torch.ones_like(p), rtol=0, atol=1e-10) for p in parameters)
    # The second derivatives are 2e-3 or more, so |x - x*| is at most |g| / 2e-3.
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert len(gradients) == 3
    assert max(float(g.norm()) for g in gradients) < 1e-12


class Owners:
    """Threads that each have a slice of all parameters, and add numbers up in turn.

    Args:
        count: of them.
        loss: of all parameters.
    """

    def __init__(self, count: int, loss: Loss) -> None:
        whole = torch.cat([p.detach().reshape(-1) for p in start()])
        self.slices = [nn.Parameter(part.clone()) for part in whole.tensor_split(count)]
        self.optimizers = [LBFGS([part]) for part in self.slices]
        self._loss, self._barrier = loss, threading.Barrier(count)
        self._values: dict[int, list[float]] = {}
        self.exchanges = 0
        for number, optimizer in enumerate(self.optimizers):
            optimizer.summed = functools.partial(self._summed, number)

    def _summed(self, number: int, values: list[float]) -> list[float]:
        self._values[number] = values
        self._barrier.wait(60)
        sums = [sum(column) for column in zip(*(self._values[n] for n in sorted(self._values)), strict=True)]
        self.exchanges += self._barrier.wait(60) == 0
        return sums

    def step(self) -> None:
        value = self._loss(self.slices)
        gradients = torch.autograd.grad(value, self.slices)
        for part, optimizer, gradient in zip(self.slices, self.optimizers, gradients, strict=True):
            part.grad, optimizer.loss = gradient, value.item()
        with ThreadPoolExecutor(len(self.slices)) as pool:
            list(pool.map(lambda optimizer: optimizer.step(), self.optimizers))


@pytest.mark.parametrize("name", ["rosenbrock", "stiff"])
@pytest.mark.parametrize("count", [1, 2, 5, 15])
def test_owners_of_slices_exchange_numbers_alone(name: str, count: int) -> None:
    """Of 12 parameters: with 15 owners some have none."""
    owners, parameters = Owners(count, PROBLEMS[name]), start()
    optimizer, evaluations = LBFGS(parameters), 25
    evaluate = closure(optimizer, PROBLEMS[name], parameters)
    for _ in range(evaluations):
        owners.step()
        optimizer.step(evaluate)
    found = torch.cat([part.detach() for part in owners.slices])
    torch.testing.assert_close(
        found, torch.cat([p.detach().reshape(-1) for p in parameters]), rtol=ROUNDING, atol=ROUNDING
    )
    iterations = optimizer.state[parameters[0]]["iteration"]
    # one an evaluation for the slope, and two an iteration: the new pair, and all products for the direction
    assert owners.exchanges <= evaluations + 2 * iterations


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_saved_state_goes_on_with_the_same_bits(after: int) -> None:
    whole, parameters = start(), start()
    one, other = LBFGS(whole), LBFGS(parameters)
    for _ in range(after):
        one.step(closure(one, stiff, whole))
        other.step(closure(other, stiff, parameters))
    again = [nn.Parameter(p.detach().clone()) for p in parameters]
    resumed = LBFGS(again)
    resumed.load_state_dict(copy.deepcopy(other.state_dict()))
    for _ in range(12):
        one.step(closure(one, stiff, whole))
        resumed.step(closure(resumed, stiff, again))
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_it_stays_at_a_point_without_a_slope() -> None:
    parameters = start()
    optimizer = LBFGS(parameters)
    for _ in range(3):
        optimizer.step(closure(optimizer, lambda ps: sum((p * 0).sum() for p in ps), parameters))  # type: ignore[arg-type,misc]
    assert all(torch.equal(a, b) for a, b in zip(parameters, start(), strict=True))


def test_who_has_no_closure_sets_the_loss() -> None:
    parameters = start()
    optimizer = LBFGS(parameters)
    with pytest.raises(InputError, match=r"write step\(closure\), or set optimizer.loss"):
        optimizer.step()


@pytest.mark.parametrize("option", ["lr=0", "history_size=0", "tolerance_grad=-1", "tolerance_change=-1"])
def test_options_out_of_their_range_are_refused(option: str) -> None:
    name, _, value = option.partition("=")
    with pytest.raises(InputError, match=f"{name}={value}"):
        LBFGS(start(), **{name: int(value)})


def test_groups_are_refused() -> None:
    one, *others = start()
    with pytest.raises(InputError, match="write one group"):
        LBFGS([{"params": [one]}, {"params": others}])
