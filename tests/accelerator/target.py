"""The device that the cases of this folder run on: the simulated accelerator, or with ``--device`` one of this host.

The simulated one computes as the CPU does, so every bit is the CPU's. A real one adds in another order, so parameters
after a few steps differ in their last digits; see :data:`FLOAT64` and :data:`BOUNDS`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.device import collective_backend, count

SIMULATED = "sim"

FLOAT64 = 1e-12
"""A gradient here is a sum of at most a few hundred products near 1, each of which float64 keeps to 1e-16: in another
order 1e-13 at most, times a learning rate of 0.1, over six steps."""

BOUNDS = {"float32": 1e-5, "autocast": 0.05}
"""By program. The same sums in float32, which keeps 6e-8 of a number (TF32 keeps 5e-4, and would be seen). In bfloat16,
which keeps 4e-3, each product may round to its other neighbour."""


@dataclass(frozen=True)
class Target:
    """A type of device.

    Args:
        kind: as torch names it.
        module: that every process imports which computes on it.
    """

    kind: str
    module: str

    @property
    def simulated(self) -> bool:
        """Whether it computes as the CPU does."""
        return self.kind == SIMULATED

    def bound(self, program: str) -> float:
        """Return how far parameters and scores of a program may be from the CPU's."""
        return 0.0 if self.simulated else BOUNDS.get(program, FLOAT64)

    def backend(self, ranks: int) -> str | None:
        """Return the backend by which so many ranks exchange memory of the device; None: they are too many for it."""
        if self.simulated:
            return "simshm_cpu"
        backend = collective_backend(self.kind)
        return backend if ranks <= count(self.kind) and backend != "gloo" else None

    def model(self, make: Callable[[], nn.Module]) -> "Model":
        """Return what makes a model in processes that have the device."""
        return Model(self.module, make)


@dataclass
class Model:
    """A model's function that takes its device into each process that receives it."""

    module: str
    make: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        """Return the model."""
        return self.make()

    def __setstate__(self, state: dict[str, Any]) -> None:
        importlib.import_module(state["module"])
        self.__dict__ |= state


def of_option(option: str) -> Target | None:
    """Return what ``--device`` names: ``sim``, a type of device, or ``auto``; None: torch sees none such here."""
    if option == SIMULATED:
        return Target(SIMULATED, "tests.accelerator.python_device")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or option not in ("auto", found.type):
        return None
    return Target(found.type, "tests.accelerator.real_device")
