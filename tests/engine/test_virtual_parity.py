"""P replicas in lockstep are one process that sees all their data; parameter by parameter, in float64."""

import functools
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from paceline import Program, Run, Strategy, train
from tests import oracle
from tests.engine import programs

STEPS = 13
"""Two and a half epochs and more of 50 samples, three replicas of 4 samples each."""

ROUNDING = 1e-12
"""Both sides add the same products in another order: some hundred rounding errors of 2e-16 each, over 13 steps."""

NORMALISED = 1e-9
"""Optimizers that divide a gradient by its own size make its relative error theirs, also where it is nearly zero."""


def run(program: Program, steps: int = STEPS, **strategy: Any) -> Run:
    return train(program, Strategy(**strategy), engine="virtual", steps=steps, progress=False)


OPTIMIZERS = {
    "sgd": (functools.partial(SGD, lr=0.1), ROUNDING),
    "momentum": (functools.partial(SGD, lr=0.1, momentum=0.9), ROUNDING),
    "nesterov": (functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True), ROUNDING),
    "weight-decay": (functools.partial(SGD, lr=0.1, weight_decay=0.1), ROUNDING),
    "adam": (functools.partial(Adam, lr=0.01), NORMALISED),
    "adamw": (functools.partial(AdamW, lr=0.01, weight_decay=0.1), NORMALISED),
    "amsgrad": (functools.partial(Adam, lr=0.01, amsgrad=True), NORMALISED),
    "rmsprop": (functools.partial(RMSprop, lr=0.01), NORMALISED),
    "adagrad, which has its state from the start": (functools.partial(Adagrad, lr=0.01), NORMALISED),
    "groups": (programs.half_decayed, NORMALISED),
}


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replicas_in_lockstep_are_one_process(name: str, replicas: int) -> None:
    optimizer, bound = OPTIMIZERS[name]
    program = programs.program(optimizer=optimizer)
    oracle.assert_same(run(program, replicas=replicas).model, oracle.one_process(program, replicas, STEPS), bound)


MOMENTUM = functools.partial(SGD, lr=0.1, momentum=0.9)

FEATURES: dict[str, dict[str, Any]] = {
    "scheduler": {"scheduler": functools.partial(StepLR, step_size=4, gamma=0.5)},
    "scheduler of every step": {"scheduler": functools.partial(CosineAnnealingLR, T_max=STEPS)},
    "clipping": {"clip_norm": 0.05},
    "loose clipping": {"clip_norm": 1e3},
    "tuple": {"model": programs.Two, "train": programs.with_tuple()},
    "dict": {"model": programs.Two, "train": programs.with_dict()},
    "tied": {"model": programs.Tied},
    "frozen": {"model": programs.frozen},
    "convolution": {"model": programs.convolution},
    "batches beyond the data": {"batch_size": 30},
    "one sample each": {"batch_size": 1},
}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", FEATURES)
def test_what_a_program_may_have(name: str, replicas: int) -> None:
    program = programs.program(**({"optimizer": MOMENTUM} | FEATURES[name]))
    oracle.assert_same(run(program, replicas=replicas).model, oracle.one_process(program, replicas, STEPS), ROUNDING)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("model", [programs.mlp, programs.dropout])
def test_fewer_samples_than_replicas_in_every_round(model: Any, replicas: int) -> None:
    program = programs.program(model=model, train=programs.data(samples=2))
    oracle.assert_same(run(program, replicas=replicas).model, oracle.rounds(program, replicas, STEPS), ROUNDING)


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("replicas", [1, 3])
def test_accumulated_batches_are_one_larger_batch(replicas: int, accumulate: int) -> None:
    program = programs.program(optimizer=MOMENTUM, clip_norm=0.5)
    trained = run(program, replicas=replicas, accumulate=accumulate)
    oracle.assert_same(trained.model, oracle.one_process(program, replicas, STEPS, accumulate), ROUNDING)
    assert trained.summary["steps"] == trained.summary["updates"] == STEPS


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_global_batch_is_divided_among_all(accumulate: int) -> None:
    program = programs.program(batch_size=None, global_batch_size=12)
    trained = run(program, replicas=3, accumulate=accumulate)
    oracle.assert_same(trained.model, oracle.one_process(program, 3, STEPS, accumulate), ROUNDING)


@pytest.mark.parametrize("epochs", [1, 3, 0.5])
def test_epochs_are_passes_over_the_data(epochs: float) -> None:
    program = programs.program()
    trained = train(program, "replicas=2", engine="virtual", epochs=epochs, progress=False)
    steps = {1: 7, 3: 21, 0.5: 4}[epochs]  # 50 = 6 · 8 + 2; in half a pass, the last batch is the first replica's alone
    if epochs == 0.5:
        expected = oracle.Plain(program)
        order = oracle.order(program, 2)
        for k in range(3):
            expected.step(expected.gradient([*order.batch(0, k), *order.batch(1, k)]))
        expected.step(expected.gradient(order.batch(0, 3)))
        values = expected.values()
    else:
        values = oracle.one_process(program, 2, steps)
    assert trained.summary["updates"] == steps
    oracle.assert_same(trained.model, values, ROUNDING)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("model", [programs.dropout, programs.batchnorm])
def test_masks_and_running_means(model: Any, replicas: int) -> None:
    """A mask depends on (seed, replica, step) alone; a buffer is the replicas' mean, weighed by samples."""
    # 48 samples: 3 replicas of 4 leave no batch of one sample, for which BatchNorm has no variance.
    program = programs.program(model=model, train=programs.data(samples=48), optimizer=MOMENTUM)
    oracle.assert_same(run(program, replicas=replicas).model, oracle.rounds(program, replicas, STEPS), ROUNDING)


def test_masks_differ_between_replicas_and_between_steps() -> None:
    seeds = {oracle.step_seed(3, replica, k) for replica in range(50) for k in range(50)}
    assert len(seeds) == 2500
    same = programs.data(samples=1)
    program = programs.program(model=programs.dropout, train=(same[0].repeat(8, 1), same[1].repeat(8)))
    oracle.assert_same(run(program, 2, replicas=2).model, oracle.rounds(program, 2, 2), ROUNDING)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_computes_in_half_the_bits_and_keeps_the_models_own(replicas: int, dtype: torch.dtype) -> None:
    """Autocast rounds to 8 bits; the two sides round the same numbers, but for the order of sums over replicas."""
    model = functools.partial(programs.mlp, dtype)
    program = programs.program(model=model, train=programs.data(dtype=dtype), precision="bf16")
    trained = run(program, replicas=replicas).model
    assert {p.dtype for p in trained.parameters()} == {dtype}
    bound = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-20
    oracle.assert_same(trained, oracle.rounds(program, replicas, STEPS), bound)


def test_bf16_is_not_full_precision() -> None:
    single = programs.program(
        model=functools.partial(programs.mlp, torch.float32), train=programs.data(dtype=torch.float32)
    )
    half = programs.program(model=single.model, train=single.train, precision="bf16")
    one, other = (dict(run(p, replicas=2).model.named_parameters()) for p in (single, half))
    assert all((one[n] - other[n]).abs().max() > 1e-5 for n in one)


def test_a_model_of_two_dtypes() -> None:
    program = programs.program(model=TwoTypes, optimizer=functools.partial(Adam, lr=0.01))
    # The float32 part rounds at 1e-7, and Adam divides by its size.
    oracle.assert_same(run(program, replicas=3).model, oracle.one_process(program, 3, STEPS), 1e-4)


class TwoTypes(torch.nn.Module):
    """A float32 vector beside float64 matrices, so that A is two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(6))
        self.rest = programs.mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(x * self.scale.double())
