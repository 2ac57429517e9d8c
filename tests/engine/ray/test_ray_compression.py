"""Compressed pushes on Ray: a plain loop with the same compression, whatever way they take, and how small they are."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import Program, Run, Strategy, launch
from paceline.compression import Compression, parse
from paceline.engine.ray.engine import RayEngine
from paceline.replica.flat_slices import slices_of
from paceline.replica.flat_state import FlatLayout
from tests import oracle
from tests.engine import programs
from tests.engine.ray.commands import pushing
from tests.engine.ray.test_ray_parity import MOMENTUM, ROUNDING

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

STEPS = 6
REPLICAS = 2

TEXTS = ["fp16", "bf16", "top-k:ratio=0.3", "powersgd:rank=1", "blocks:size=10"]


def compressed(program: Program, compression: Compression[Any], servers: int) -> oracle.Values:
    """The plain loop, in which each replica's gradient is cut and compressed as for so many servers."""
    layout = FlatLayout.of(program.build())
    slices = slices_of(layout, servers, MOMENTUM, whole_parameters=compression.whole_parameters)
    states = [
        [
            compression.start([tuple(e.shape) for e in part.layout.parameters[0].entries], torch.float64)
            for part in slices
        ]
        for _ in range(REPLICAS)
    ]

    def sent(replica: int, gradient: oracle.Values) -> oracle.Values:
        vector = torch.cat([gradient[name].reshape(-1) for name in layout.parameter_names])
        for part, state in zip(slices, states[replica], strict=True):
            compression.encode(state, vector[part.spans[0]])
        return {entry.name: view for (entry, view) in entries(layout, vector)}

    return oracle.rounds(program, REPLICAS, STEPS, sent)


def entries(layout: FlatLayout, vector: torch.Tensor) -> Any:
    [block] = layout.parameters
    return zip(block.entries, block.views(vector), strict=True)


@pytest.mark.parametrize("way", ["memory", "bytes", "calls"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("servers", [1, 2])
def test_they_are_a_plain_loop_with_it(engine: RayEngine, text: str, servers: int, way: str) -> None:
    program = programs.program(model=programs.wide, optimizer=MOMENTUM)
    strategy = Strategy(replicas=REPLICAS, servers=servers, compression=text)
    loop = functools.partial(pushing, way=way)
    run = launch(loop, program, strategy, engine=engine, steps=STEPS, progress=False, evaluate_every=10**6)
    oracle.assert_same(run.model, compressed(program, parse(text), servers), ROUNDING)


@pytest.mark.parametrize("policy", ["asynchronous", "smooth-switch:every=4", "local-steps:period=2"])
def test_under_any_policy(on_ray: OnRay, policy: str) -> None:
    program = programs.program(optimizer=MOMENTUM)
    run = on_ray(program, f"replicas=3 servers=2 compression=top-k:ratio=0.5 aggregation={policy}", steps=STEPS)
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]
    assert math.isfinite(run.history[-1].train_loss or math.nan)


def test_what_is_pushed_is_counted_as_it_travels(on_ray: OnRay) -> None:
    program = programs.program(model=programs.wide)
    plain, small = (on_ray(program, f"replicas=1 compression={text}", steps=4) for text in ("none", "bf16"))
    size = plain.summary["parameter_bytes"][0]
    assert plain.summary["payload_bytes_per_step"] == 2 * size
    assert small.summary["payload_bytes_per_step"] == size + size // 4, "float64 in 16 bits"
