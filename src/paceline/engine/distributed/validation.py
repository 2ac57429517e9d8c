"""Validation of models and optimizers under ``shard_parameters=true`` (FSDP2), before anything starts."""

import torch

from paceline.core.errors import InputError
from paceline.core.types import ReplicaId
from paceline.engine.distributed.fsdp import units
from paceline.program import Program
from paceline.replica.flat_optimizer import ELEMENTWISE

_ELEMENTWISE = (
    *ELEMENTWISE,
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
)
"""Optimizers that treat each element alone, so that a step on each shard is a step on the whole parameter.

Others fail on torch's DTensors (2.13: Adafactor, and optimizers that mix them with tensors of their own, such as LARS
and LAMB), or compute something else there (Muon: 0.01 apart after 13 steps of 0.01).
"""


def refuse_model(program: Program) -> None:
    """Raise InputError if ``shard_parameters=true`` can't shard this model or its optimizer among ranks."""
    module = program.build()
    for name, layer in module.named_modules():
        if getattr(layer, "sparse", False) is True:
            raise InputError(
                f"{name or 'the model'} has sparse gradients, which shard_parameters=True can't sum; write "
                "nn.Embedding(…, sparse=False)"
            )
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise InputError(
                f"parameter {name} is a single number, and shard_parameters=True cuts parameters along their first "
                "dim; write torch.nn.Parameter(torch.ones(1)), or shard_optimizer=true instead"
            )
    # A parameter that several units share is summed with the first of them.
    seen: set[int] = set()
    for unit in units(module):
        own = {n: p for n, p in unit.named_parameters() if p.requires_grad and id(p) not in seen}
        seen.update(map(id, own.values()))
        dtypes = {str(p.dtype).removeprefix("torch."): name for name, p in own.items()}
        if len(dtypes) > 1:
            listing = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            raise InputError(
                f"shard_parameters=True sums all gradients of {type(unit).__name__} in one go, but they have several "
                f"dtypes ({listing}); put them into layers of their own in an nn.Sequential, or write "
                "shard_optimizer=true"
            )
    optimizer = program.optimizer([p for p in module.parameters() if p.requires_grad])
    if type(optimizer) not in _ELEMENTWISE:
        known = ", ".join(sorted(kind.__name__ for kind in _ELEMENTWISE))
        raise InputError(
            f"shard_parameters=True gives each rank a part of each parameter, and {type(optimizer).__name__} may have "
            f"to look at the whole; write shard_optimizer=true instead, or one of torch.optim's {known}"
        )


def ended_within_a_delta(replica: ReplicaId, accumulate: int) -> InputError:
    """Return the error of a loop that ends within an update, when its first batches are in the others' sum already."""
    return InputError(
        f"the loop of replica {replica} ended between two of the accumulate={accumulate} batches of one update, but "
        "shard_parameters=True has summed the first of them already; end it after the last"
    )
