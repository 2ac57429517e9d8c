"""When each rank keeps a part of the optimizer's state though nobody asked for it."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Program
from paceline.engine.distributed.zero1 import LEAST_ELEMENTS, pays
from paceline.optim import Lamb
from paceline.replica.flat_state import FlatLayout

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def would(optimizer: Any = MOMENTUM, backend: str = "shm", size: int = LEAST_ELEMENTS) -> bool:
    module = nn.Linear(size, 1, bias=False)
    data = (torch.zeros(1, size), torch.zeros(1, size))
    program = Program(lambda: module, nn.functional.mse_loss, optimizer, data)
    return pays(program, FlatLayout.of(module), backend)


@pytest.mark.parametrize(
    "optimizer", [MOMENTUM, functools.partial(torch.optim.Adam, lr=0.1), functools.partial(torch.optim.SGD, lr=0.1)]
)
def test_where_it_was_measured_to_pay(optimizer: Any) -> None:
    assert would(optimizer)


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": functools.partial(Lamb, lr=0.1)},  # looks at whole parameters
        {"backend": "gloo"},
        {"size": LEAST_ELEMENTS - 1},
    ],
    ids=str,
)
def test_where_it_was_not(given: dict[str, Any]) -> None:
    assert not would(**given)
