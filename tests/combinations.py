"""What runs with what: each cell of the README's table is a run that is compared with its oracle, or a refusal."""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline import InputError, Program, Run, train
from paceline.aggregation import Aggregation, registered
from tests.accelerator.target import Target

STEPS = 4

CLOSE = 1e-12
"""Both sides add the same float64 products near 1, a few hundred of them, in another order."""

FORMS = {
    "one process": "",
    "`shards`": "shards=2",
    "branches": "shards=2 shard_rules=b*:branch",
    "`stages`": "stages=2 micro_batches=2",
    "`stages` × `shards`": "stages=2 shards=2 micro_batches=2",
}
"""Of a replica: what its strategy says of it."""

WORKERS = {"one process": 1, "`shards`": 2, "branches": 2, "`stages`": 2, "`stages` × `shards`": 4}

OPTIONS = {
    "buffered": ":k=1",
    "decoupled": ":period=2",
    "elastic-averaging": ":period=2,elasticity=0.1",
    "local-steps": ":period=2",
    "sandblaster": ":portions=3",
    "smooth-switch": ":every=3",
    "stale-synchronous": ":bound=2",
}
"""Of a policy, so that what is special about it happens within a few steps."""

ENGINES = ("local", "distributed", "virtual", "ray")

START, END = "<!-- combinations -->\n", "<!-- end of combinations -->\n"


class Cell(NamedTuple):
    """One aggregation over one form of replica on one engine."""

    policy: str
    form: str
    engine: str


class Forked(nn.Module):
    """Two branches between a layer and another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.b1, self.b2, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(12, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(torch.cat([self.b1(x), self.b2(x)], 1).tanh())


def program() -> Program:
    """24 samples, in batches of 4."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=draw, dtype=torch.float64)
    return Program(
        model=Forked,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        train=(x, torch.randint(4, (24,), generator=draw)),
        batch_size=4,
        seed=2,
    )


def policies() -> list[str]:
    """All that there are, synchronous ones first."""
    return sorted(registered(Aggregation), key=lambda name: (name != "synchronous", name))


def cells(engine: str, forms: Iterable[str] = tuple(FORMS)) -> list[Cell]:
    """Of one engine; those of one form in a row, for Ray has the same actors for them."""
    return [Cell(policy, form, engine) for form in forms for policy in policies()]


def tried(cell: Cell, engine: Any, target: Target | None = None) -> str:
    """Nothing where it ran and ended as one process on the CPU does, or why it was refused.

    Args:
        cell: what is tried.
        engine: a name, or an engine.
        target: computes; None: the CPU does.

    Raises:
        AssertionError: it ended elsewhere.
    """
    try:
        run = _run(f"{FORMS[cell.form]} aggregation={cell.policy}{OPTIONS.get(cell.policy, '')}", engine, target)
    except InputError as error:
        return _reason(str(error))
    expected = oracle(cell.policy)
    assert run.state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            run.state[name], value, rtol=0, atol=CLOSE, msg=functools.partial(_told_of, cell, name)
        )
    return ""


def _told_of(cell: Cell, name: str, told: str) -> str:
    return f"{cell}: {name}: {told}"


@functools.cache
def oracle(policy: str) -> Mapping[str, Tensor]:
    """What one process comes to: a lone replica's gradients are applied one after the other, whoever decides it."""
    own = policy in ("decoupled", "elastic-averaging", "local-steps", "sandblaster")
    return dict(_run(f"aggregation={policy}{OPTIONS[policy]}" if own else "", "virtual").state)


def _run(strategy: str, engine: Any, target: Target | None = None) -> Run:
    made, words = program(), f"replicas=1 {strategy}"
    if target is not None:
        made, words = replace(made, model=target.model(made.model)), f"{words} device={target.kind}"
    return train(made, words, engine=engine, steps=STEPS, evaluate_every=STEPS, progress=False)


def _reason(text: str) -> str:
    """Without whose it is, and without what to write instead."""
    why = text.rpartition("; write")[0] or text
    return re.sub(r"^aggregation=\S+: ", "", why)


def table(found: Mapping[Cell, str]) -> str:
    """Markdown: the engines on which each cell runs, and below it why it does not on the others."""
    notes: dict[str, int] = {}
    lines = [f"| aggregation | {' | '.join(FORMS)} |", f"|{'---|' * (len(FORMS) + 1)}"]
    for policy in policies():
        shown = (_shown([Cell(policy, form, engine) for engine in ENGINES], found, notes) for form in FORMS)
        lines.append(f"| {policy} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *_told(notes), ""])


def _shown(some: Sequence[Cell], found: Mapping[Cell, str], notes: dict[str, int]) -> str:
    runs = [cell.engine for cell in some if not found[cell]]
    why = sorted({notes.setdefault(found[cell], len(notes) + 1) for cell in some if found[cell]})
    marks = f"<sup>{','.join(map(str, why))}</sup>" if why else ""
    return f"{'✓' if len(runs) == len(some) else ', '.join(runs) or '—'}{marks}"


def _told(notes: Mapping[str, int]) -> Iterator[str]:
    for reason, number in notes.items():
        yield f"{number}. {reason}"
