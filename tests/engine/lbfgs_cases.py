"""Problems for L-BFGS, and what torch's makes of them in 20 iterations on all samples at once."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline import LBFGS, Program
from tests import oracle
from tests.engine import programs

ITERATIONS = 20

ROUNDING = 1e-10
"""20 iterations; sums over samples and over slices are taken in another order, and a search amplifies that."""


def logistic() -> nn.Module:
    return nn.Linear(6, 3).double()


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def stiff() -> nn.Module:
    """Begins with weights of very different size, so that line searches take several trials."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight.mul_(20)
        model[2].weight.mul_(0.01)
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "logistic": logistic,
    "mlp": programs.mlp,
    "deep": deep,
    "stiff": stiff,
}


def decayed(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) + 1e-3 * output.square().mean()


def portioned(name: str, portions: int, **fields: Any) -> Program:
    """A problem whose batch of so many portions is all samples."""
    size = -(-programs.SAMPLES // portions)
    given: dict[str, Any] = {"optimizer": functools.partial(LBFGS, history_size=10), "test": programs.data()}
    return programs.program(model=CASES[name], loss=decayed, batch_size=size, **(given | fields))


@functools.cache
def iterated(name: str) -> tuple[oracle.Values, int]:
    """The model after 20 iterations of torch's L-BFGS, and how many evaluations they took."""
    plain = oracle.Plain(portioned(name, 1, optimizer=functools.partial(torch.optim.SGD, lr=1.0)))
    options: dict[str, Any] = {"line_search_fn": "strong_wolfe", "history_size": 10}
    optimizer = torch.optim.LBFGS(plain.module.parameters(), max_iter=ITERATIONS, max_eval=10000, **options)
    inputs, targets = programs.data()

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = decayed(plain.module(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(evaluate)
    state = optimizer.state[next(plain.module.parameters())]
    assert state["n_iter"] == ITERATIONS, "it has not converged before"
    return plain.values(), state["func_evals"]
