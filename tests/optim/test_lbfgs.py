"""L-BFGS by evaluations against torch's, which calls for them, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
