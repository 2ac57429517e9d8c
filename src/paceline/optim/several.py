"""Several optimizers, each of a part of the model, that step by themselves: generator and discriminator, say."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.errors import InputError


class SeveralOptimizers(Optimizer):
    """Optimizers of parts of a model; a step is one of those parts that have a share in it.

    Args:
        parts: by name.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        super().__init__([group for each in parts.values() for group in each.param_groups], {})
        self.parts = dict(parts)
        for each in self.parts.values():  # one state for all, as one optimizer of all groups has it
            each.state = self.state
        self.shares: Mapping[str, float] = dict.fromkeys(parts, 1.0)
        """Of each part, the share of the weights of Δs that are of it; 0: it makes no step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a step of each part with a share, by the mean of the gradients that are of it."""
        del closure
        for name, each in self.parts.items():
            share = self.shares[name]
            if not share:
                continue
            if share != 1.0:
                torch._foreach_div_([p.grad for group in each.param_groups for p in group["params"]], share)
            each.step()


@dataclass(frozen=True)
class OptimizerOfParts:
    """Parameters of a whole model -> :class:`SeveralOptimizers`.

    Args:
        makes: by name: what makes the optimizer of that part.
        indices: by name: the numbers of its parameters among all that are trained.
    """

    makes: Mapping[str, Callable[[Any], Optimizer]]
    indices: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, makes: Mapping[str, Callable[[Any], Optimizer]], module: nn.Module) -> "OptimizerOfParts":
        """Return that of a model whose submodules have the names of the optimizers.

        Raises:
            InputError: a name is no submodule's, or the parts are not all parameters, each once.
        """
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        number = {id(parameter): i for i, (_, parameter) in enumerate(trained)}
        indices = dict[str, list[int]]()
        for name in makes:
            try:
                part = module.get_submodule(name)
            except AttributeError as error:
                children = ", ".join(name for name, _ in module.named_children())
                raise InputError(
                    f"optimizer={{{name!r}: …}}, but the model has no submodule {name!r}; write the names of its "
                    f"submodules, of {children}"
                ) from error
            indices[name] = [number[id(p)] for p in part.parameters() if p.requires_grad]
        counts = [sum(i in each for each in indices.values()) for i in range(len(trained))]
        for (name, _), count in zip(trained, counts, strict=True):
            if count != 1:
                raise InputError(
                    f"{name} belongs to {'no' if not count else 'more than one'} optimizer of "
                    f"optimizer={{{', '.join(map(repr, makes))}}}; write one for each submodule, without overlap"
                )
        if len({p.dtype for _, p in trained}) > 1:
            raise InputError("several optimizers need parameters of one dtype; write model=lambda: make().float()")
        return cls(dict(makes), indices)

    def __call__(self, parameters: Iterable[Any]) -> SeveralOptimizers:
        """Make the optimizer of all parameters, in the model's order."""
        every = list(parameters)
        return SeveralOptimizers({n: make([every[i] for i in self.indices[n]]) for n, make in self.makes.items()})
