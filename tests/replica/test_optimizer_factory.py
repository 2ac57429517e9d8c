"""Optimizers as a program makes them."""

import subprocess
import sys

FRESH = """
import functools, sys, torch
import paceline.replica.compilation
from paceline.replica.flat_state import FlatLayout
from paceline.replica.optimizer_factory import build_optimizer, optimizer_of_part

make = functools.partial(torch.optim.Adam, lr=0.1)
build_optimizer(make, [torch.zeros(3)])
layout = FlatLayout.of(torch.nn.Linear(2, 3))
shapes = torch.zeros(3, 2), torch.zeros(3)
build_optimizer(optimizer_of_part(make, layout, layout), [torch.nn.Parameter(t) for t in shapes])
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
make([torch.zeros(3)])
print("torch._dynamo" in sys.modules)
"""


def test_an_optimizer_is_built_without_the_compiler_which_torch_imports_as_ever_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
