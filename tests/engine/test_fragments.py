"""A that is exchanged in fragments, each in turn: what a plain loop of Streaming DiLoCo does (arXiv 2501.18512)."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from paceline import InputError, train
from paceline.engine.local.engine import LocalEngine
from tests.engine import programs
from tests.oracle import Plain, Values, order

REPLICAS, UPDATES = 3, 9

ROUNDING = 1e-12
"""Both sides add the same products, some of them in another order; AdamW makes a relative error that of A: 1e-9."""


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def program(**fields: Any) -> Any:
    return programs.program(**{"model": deep} | fields)


def streamed(program: Any, fragments: list[set[str]], each: int, outer: dict[str, Any], overlap: int = 0) -> Values:
    """Replicas that make ``each`` steps of their own between two exchanges of one fragment.

    With an overlap they take it over some steps late, as the mean of their own and of A's.
    """
    replicas, data = [Plain(program) for _ in range(REPLICAS)], order(program, REPLICAS)
    shared = replicas[0].values()
    outers = [SGD([shared[name] for name in sorted(names)], **outer) for names in fragments]
    late: set[str] = set()
    for update in range(UPDATES):
        samples = [0] * REPLICAS
        for r, replica in enumerate(replicas):
            for k in range(each):
                if k == overlap:
                    take_over(replica, shared, late, 0.5 if overlap else 1.0)
                batch = data.batch(r, update * each + k)
                samples[r] += len(batch)
                if len(batch):
                    replica.step(replica.gradient(batch))
        late = fragments[update % len(fragments)]
        for name in late:
            moved = [
                s / sum(samples) * (r.trained[name].detach() - shared[name])
                for s, r in zip(samples, replicas, strict=True)
            ]
            shared[name].grad = -sum(moved)
        outers[update % len(fragments)].step()
    return shared


def take_over(replica: Plain, shared: Values, names: set[str], share: float) -> None:
    for name in names:
        own = replica.trained[name].data
        own.copy_((1 - share) * own + share * shared[name])


NAMES = [f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]
CUTS = {1: [set(NAMES)], 2: [set(NAMES[:2]), set(NAMES[2:])], 3: [set(NAMES[:2]), set(NAMES[2:3]), set(NAMES[3:])]}
"""48 + 8, 64 + 8 and 24 + 3 elements: the largest fragment is as small as it can be."""

ADAMW = functools.partial(AdamW, lr=0.01)


@pytest.mark.parametrize("fragments", CUTS)
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_an_overlap_equals_a_plain_loop(fragments: int, overlap: int) -> None:
    it, each = program(optimizer=ADAMW), 3
    policy = f"local-steps:period={each * fragments},fragments={fragments},overlap={overlap},outer=nesterov"
    run = train(it, f"replicas={REPLICAS} aggregation={policy}", engine="virtual", steps=each * UPDATES, progress=False)
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    for name, value in streamed(it, CUTS[fragments], each, outer, overlap).items():
        torch.testing.assert_close(run.state[name], value, rtol=0, atol=1e-9, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.parametrize("fragments", CUTS)
@pytest.mark.parametrize(
    ("outer", "options"),
    [
        ("outer=nesterov", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        ("outer=(momentum:lr=0.5,momentum=0.5)", {"lr": 0.5, "momentum": 0.5}),
        ("", {"lr": 1.0}),
    ],
)
def test_equals_a_plain_loop(fragments: int, outer: str, options: dict[str, Any]) -> None:
    it = program(optimizer=ADAMW)
    strategy = f"replicas={REPLICAS} aggregation=local-steps:period={2 * fragments},fragments={fragments}"
    run = train(it, strategy + (f",{outer}" if outer else ""), engine="virtual", steps=2 * UPDATES, progress=False)
    assert run.summary["updates"] == UPDATES
    for name, value in streamed(it, CUTS[fragments], 2, options).items():
        torch.testing.assert_close(run.state[name], value, rtol=0, atol=1e-9, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_local_engine_does_the_same(engine: LocalEngine, overlap: int) -> None:
    policy = f"local-steps:period=6,fragments=3,overlap={overlap},outer=nesterov"
    it, strategy = program(), f"replicas={REPLICAS} aggregation={policy}"
    run, virtual = (train(it, strategy, engine=how, steps=2 * UPDATES, progress=False) for how in (engine, "virtual"))
    for name, value in virtual.state.items():
        torch.testing.assert_close(run.state[name], value, rtol=0, atol=ROUNDING)


def test_one_fragment_after_the_other_changes() -> None:
    """After an update the others are as they were."""
    it, seen = program(), []
    for updates in range(4):
        strategy = "replicas=2 aggregation=local-steps:period=3,fragments=3"
        run = train(it, strategy, engine="virtual", steps=max(updates, 1), evaluate_every=100, progress=False)
        seen.append(dict(run.state) if updates else it.build().state_dict())
    for update in range(3):
        changed = {name for name in NAMES if not torch.equal(seen[update][name], seen[update + 1][name])}
        assert changed == CUTS[3][update]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("local-steps:period=8,fragments=3", "write period=9"),
        ("local-steps:period=8,fragments=0", "fragments"),
        ("local-steps:period=8,fragments=2,over=asynchronous", "another part of A; write over=synchronous"),
        ("local-steps:period=8,fragments=4,overlap=2", "write overlap=1 or less"),
        ("local-steps:period=8,fragments=8", "the model has 6 parameters to train"),
    ],
)
def test_what_can_not_be_cut_is_refused(policy: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        train(program(), f"replicas=2 aggregation={policy}", engine="virtual", steps=8, progress=False)
