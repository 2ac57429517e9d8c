"""Runs whose losses are read when the next Δ is complete, as nobody asks before: beside the same runs on the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import NonFiniteError, Program, Strategy, train
from paceline.engine.checkpointing import Checkpointer
from paceline.engine.distributed.client import AllReduceClient
from paceline.replica.base import Measured
from tests.accelerator.engine_cases import ALONE, DRAWING, ON_CPU, POLICIES, PROGRAMS, single
from tests.accelerator.target import SIMULATED
from tests.engine import programs as small

STEPS = 15
"""More than an epoch, whose last round is uneven, and gives each of two replicas one sample."""

STEPS_OF = {"batchnorm": 6}
"""Steps of programs that need two samples each."""

SETTLED = 4
"""Steps after which all that is made once is there."""

BROKEN = (3, 36)
"""Samples that are not numbers, in one run or another: the second one comes to one or two replicas as A is saved."""

noted: list[int] = []
"""How often the host had waited for the device, at each forward pass in training, or before each exchange."""


strict: set[int] = set()
"""Numbers of those from which on to the next one torch raises an error where the host waits for CUDA."""


def note(kind: str) -> None:
    """Note how often the host has waited for a device of this type."""
    noted.append(torch.sim.copies.waits if kind == SIMULATED else 0)
    if kind == "cuda":
        torch.cuda.set_sync_debug_mode("error" if len(noted) in strict else "default")


class Watched(nn.Module):
    """Notes it at each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.device.type != "cpu":
            note(x.device.type)
        return x


@contextmanager
def of_exchanges(kind: str) -> Iterator[None]:
    """Context manager: it is noted before each exchange instead, for a captured model's parts are called as they like.

    Args:
        kind: of the device.
    """
    push = AllReduceClient.push

    def noting(client: AllReduceClient, measured: Measured) -> None:
        if client.attempt == 1:
            noted.clear()
        note(kind)
        push(client, measured)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(AllReduceClient, "push", noting)
        patches.setattr(Watched, "forward", lambda _, x: x)
        yield


class Looked(nn.Module):
    """A model that computes on no A that is not finite; a real device is not asked, since that waits for it.

    No graph can be captured of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = small.mlp(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type in ("cpu", SIMULATED):
            assert all(bool(parameter.isfinite().all()) for parameter in self.parameters())
        return self.inner(x)


def run(program: Program, strategy: str, engine: str, kind: str, **settings: Any) -> Any:
    """Train on a device a model that notes it, and whose Δs are computed one at a time on the CPU, too."""
    noted.clear()
    settings, make = {"evaluate_every": 4, "steps": STEPS} | settings, program.model
    program = replace(program, model=lambda: nn.Sequential(Watched(), make()))
    text = strategy if kind == "cpu" else f"{strategy} device={kind}".strip()
    engine = ON_CPU.get(engine, engine) if kind == "cpu" else engine
    return train(program, text, engine=engine, progress=False, **settings)


def difference(program: str, strategy: str, engine: str, kind: str) -> float:
    """Return how far parameters, losses and scores on the accelerator are from the CPU's."""
    steps = STEPS_OF.get(program, STEPS)
    one, other = (run(PROGRAMS[program], strategy, engine, each, steps=steps) for each in ("cpu", kind))
    found = [float((one.state[name] - other.state[name]).abs().max()) for name in one.state]
    for record, same in zip(one.history, other.history, strict=True):
        assert (record.train_loss is None) == (same.train_loss is None)
        found.append(abs((record.train_loss or 0.0) - (same.train_loss or 0.0)))
    return max(found)


def noise_difference(strategy: str, engine: str, kind: str) -> float:
    """Return how far the gradient noise scale on the accelerator is from the CPU's, relative to that."""
    inputs, targets = small.data()
    program = replace(PROGRAMS["momentum"], train=(inputs, torch.zeros_like(targets)))  # one class: more signal
    one, other = (
        run(program, strategy, engine, each, noise_scale=True).summary["noise_scale_mean"] for each in ("cpu", kind)
    )
    assert one > 0
    return abs(float(other / one) - 1.0)


def waits(program: str, strategy: str, engine: str, kind: str, **settings: Any) -> list[int]:
    """Return how often the host waited for all that the device had been given, in each step but the first ones.

    A step goes from one forward pass to the next, or from one exchange to the next where replicas have several ranks.
    For a loss it may wait, if the device has been given another Δ since; and a stage for the shape of a first message,
    so there all batches have one.
    """
    steps, spread = STEPS_OF.get(program, STEPS), Strategy.parse(strategy).spread
    strict.update(range(SETTLED + 1, steps))
    trained = replace(PROGRAMS[program], drop_last=spread)
    with of_exchanges(kind) if spread else nullcontext():
        run(trained, strategy, engine, kind, evaluate_every=100, steps=steps, **settings)
    strict.clear()
    assert len(noted) >= steps
    torch.accelerator.synchronize()
    return [after - before for before, after in zip(noted[SETTLED:-1], noted[SETTLED + 1 :], strict=True)]


def broken(sample: int, strategy: str, engine: str, kind: str, folder: Path) -> tuple[str, list[tuple[int, str]]]:
    """Return the error of a run with a sample that is not a number; and version and text of all that is saved."""
    inputs, targets = small.data(dtype=torch.float32)
    inputs[sample] = float("nan")
    saved = list[tuple[int, str]]()

    def save(checkpointer: Checkpointer, now: float, snapshot: Any = None) -> None:
        chunks = sorted(checkpointer._take().chunks, key=lambda chunk: chunk.name)
        version = checkpointer._loop.coordinator.version
        losses = checkpointer._loop.state(now).history.losses if checkpointer._part == 0 else ()
        saved.append((version, str([(c.name, c.tensor.tolist()) for c in chunks]) + str(losses)))

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Checkpointer, "save", save)
        with pytest.raises(NonFiniteError) as raised:
            run(
                small.program(model=Looked if "shards" not in strategy else single, train=(inputs, targets)),
                *(strategy, engine, kind),
                checkpoint=folder / f"{kind} {sample} {strategy}",
                checkpoint_every="2 steps",
            )
    return str(raised.value), saved


def same_end(strategy: str, engine: str, kind: str, folder: Path) -> None:
    """Raise AssertionError unless a Δ that is not finite ends a run as on the CPU, with what was saved before."""
    for sample in BROKEN:
        one, other = (broken(sample, strategy, engine, each, folder) for each in ("cpu", kind))
        assert "is not finite (loss nan)" in one[0]
        assert one[1] or sample != BROKEN[0], "nothing was saved"
        assert one[0] == other[0]
        if kind == SIMULATED:
            assert one[1] == other[1]
        assert [version for version, _ in one[1]] == [version for version, _ in other[1]]


def outcomes(
    strategies: Sequence[str], engine: str, kind: str, folder: Path, programs: Sequence[str] = tuple(PROGRAMS)
) -> dict[str, float]:
    """Return how far each program is from the CPU's; on the way, raise AssertionError where a step waits.

    Args:
        strategies: the first one of all programs, the others of one.
        engine: of the runs.
        kind: of the device.
        folder: for checkpoints.
        programs: by name.
    """
    names = [name for name in programs if name not in DRAWING or kind == SIMULATED]
    cases = [(name, strategies[0]) for name in names] + [("float32", each) for each in strategies[1:]]
    found = {f"{name} {strategy}".strip(): difference(name, strategy, engine, kind) for name, strategy in cases}
    for name, strategy in cases:
        assert not any(waits(name, strategy, engine, kind)), (name, strategy)
    for strategy in [each for each in strategies if "aggregation" not in each and "shard_" not in each]:
        found[f"momentum {strategy}, noise"] = noise_difference(strategy, engine, kind)
        assert not any(waits("momentum", strategy, engine, kind, noise_scale=True)), strategy
    if kind == SIMULATED and "shard_parameters" not in strategies[0]:  # where the host has to know at once, it counts
        assert all(waits("momentum", strategies[0], engine, kind, on_nonfinite="skip"))
    for strategy in strategies:
        same_end(strategy, engine, kind, folder)
    return found


def alone(engine: str, kind: str, folder: str) -> dict[str, float]:
    """Return the outcomes of one worker, or in virtual time of three replicas besides."""
    # Others have parameters of their own, whose gradients they look at in each step.
    several = [f"replicas=3 aggregation={policy}" for policy in POLICIES[:4]] if engine == "virtual" else []
    return outcomes([*ALONE[:2], *several], engine, kind, Path(folder))
