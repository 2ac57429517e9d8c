"""Pipelines whose weights move within a stream, trained by a whole engine, and the one process that they must equal."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.optim.lr_scheduler import StepLR

from paceline import Program, Strategy, train
from paceline.core.data_order import DataOrder
from paceline.engine.base import Engine
from paceline.replica.pipeline.micro_batches import micro_batch_sizes
from tests import zoo
from tests.engine.pipeline_cases import ADAM, Case
from tests.oracle import Plain, feed, pick

STEPS = 9

CASES: dict[str, Case] = {
    "mlp": Case(zoo.mlp, "schedule=pipedream"),
    "cnn": Case(zoo.cnn, "schedule=pipedream"),
    "unet": Case(zoo.unet, "schedule=pipedream recompute=all", {"optimizer": ADAM}),
    "encoder": Case(zoo.encoder, "schedule=pipedream recompute=boundaries"),
    "inception": Case(zoo.inception, "schedule=pipedream-2bw", {"optimizer": ADAM}),
    "masked": Case(zoo.masked, "schedule=pipedream-2bw"),
    "scheduled": Case(zoo.mlp, "schedule=pipedream", {"scheduler": functools.partial(StepLR, step_size=2, gamma=0.5)}),
}

CUTS: dict[str, dict[int, tuple[str, ...]]] = {
    "mlp": {2: ("2",), 3: ("1", "2"), 4: ("1", "2", "3.2")},
    "cnn": {2: ("1",), 3: ("1", "4"), 4: ("1", "2", "4")},
    "unet": {2: ("bottom",), 3: ("bottom", "up.1"), 4: ("down.1", "bottom", "up.1")},
    "encoder": {
        2: ("layers.layers.1",),
        3: ("layers.layers.1", "layers.layers.2"),
        4: ("layers.layers.1", "layers.layers.2", "head"),
    },
    "scheduled": {2: ("2",), 3: ("1", "2"), 4: ("1", "2", "3.2")},
}
"""Where stages begin, so that it is known whose weights are how old. Under 2BW all are of one age."""


def trained(case: str, stages: int, engine: str | Engine, steps: int = STEPS) -> Any:
    """What a run leaves: the model, and what it counted."""
    strategy = replace(
        Strategy.parse(f"stages={stages} {CASES[case].strategy}"), cuts=CUTS.get(case, {}).get(stages, ())
    )
    run = train(CASES[case].program, strategy, engine=engine, steps=steps, progress=False, trace=True)
    names = ("steps", "updates", "applied", "staleness", "staleness_max", "notes", "interrupted")
    return run.model.state_dict(), {name: run.summary[name] for name in names}, run.spans


def expected(case: str, stages: int, steps: int = STEPS) -> dict[str, Tensor]:
    """What the run must leave."""
    program = CASES[case].program
    names = [name for name, _ in Plain(program).module.named_parameters()]
    if case not in CUTS:
        return versions(program, dict.fromkeys(names, 0), lambda _: 1, 2 * stages, steps)[-1]
    return versions(program, stages_of(names, CUTS[case][stages]), lambda j: stages - 1 - j, 1, steps)[-1]


def stages_of(names: list[str], cuts: tuple[str, ...]) -> dict[str, int]:
    """Whose each parameter is, where modules stand in the order in which they are called."""
    found, places = {}, [min((k for k, n in enumerate(names) if _within(n, cut)), default=-1) for cut in cuts]
    for k, name in enumerate(names):
        found[name] = max((j + 1 for j, place in enumerate(places) if 0 <= place <= k), default=0)
    return found


def _within(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def versions(
    program: Program, stage_of: Mapping[str, int], stale: Callable[[int], int], micro_batches: int, steps: int = STEPS
) -> list[dict[str, Tensor]]:
    """A after each update of a plain loop that keeps all that there were.

    w(t+1) = w(t) - step(∇f(w_0(t - s_0), ..., w_{p-1}(t - s_{p-1}))), s_j of stage j.
    """
    plain = Plain(program)
    order = DataOrder(zoo.SAMPLES, program.batch_size or 32, 1, program.seed)
    history = [plain.values()]
    for t in range(steps):
        weights = {
            name: history[max(0, t - stale(stage))][name].clone().requires_grad_() for name, stage in stage_of.items()
        }
        indices = torch.from_numpy(order.batch(0, t))
        for rows in torch.split(indices, micro_batch_sizes(len(indices), micro_batches)):
            _loss(plain, weights, rows, len(rows) / len(indices)).backward()  # type: ignore[no-untyped-call]
        plain.step({name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in weights.items()})
        history.append(plain.values())
    return history


def _loss(plain: Plain, weights: Mapping[str, Tensor], rows: Tensor, weight: float) -> Tensor:
    inputs, targets = (pick(part, rows) for part in plain.program.train)  # type: ignore[union-attr]

    def called(*args: Any, **kwargs: Any) -> Any:
        return functional_call(plain.module, dict(weights), args, kwargs)

    loss: Tensor = plain.program.loss(feed(called, inputs), targets) * weight  # type: ignore[arg-type]
    return loss
