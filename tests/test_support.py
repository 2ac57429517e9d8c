"""The table of support: each row is reached, its sentence is complete, and the README's table is made from it."""

import os
import string
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import pytest

from paceline import support
from paceline.aggregation import Aggregation, registered
from paceline.aggregation.base import Apply, Arrival, Decision, Release, Unsynchronized
from paceline.core.delta import Change, Delta, Gradient
from paceline.core.errors import InputError
from paceline.reduction import Reducer
from paceline.reduction.delay_compensation import DelayCompensation
from paceline.strategy import Strategy
from paceline.support import ENGINE_FEATURES, TABLE, Case, Row


@dataclass(frozen=True)
class Reduced(Unsynchronized[None]):
    """A policy of somebody's own, by a reducer that needs A as it was read."""

    kind: Delta = field(default_factory=Gradient)
    held: int = 1

    @property
    def delta(self) -> Delta:
        return self.kind

    @property
    def reducer(self) -> Reducer:
        return DelayCompensation()

    def slots(self, replicas: int) -> int:
        return self.held

    def start(self, replicas: int) -> None:
        return None

    def arrived(self, state: None, arrival: Arrival) -> tuple[None, Decision]:
        return state, (Apply(((arrival, 1.0),)), Release((arrival.replica,)))


CASES = [
    ("new", "shards=2", {"features": frozenset()}),
    ("local", "shard_rules=head:whole", {}),
    ("new", "stages=2", {"features": frozenset()}),
    ("local", "replicas=2 compression=fp16", {}),
    ("local", "replicas=2 shard_parameters=true", {}),
    ("local", "replicas=2 shard_optimizer=true", {}),
    ("local", "replicas=2 servers=2", {}),
    ("distributed", "replicas=2 servers=2", {}),
    ("local", "replicas=2 standby=1", {}),
    ("new", "compile=true", {"features": frozenset()}),
    ("local", "replicas=2 aggregation=asynchronous pull_ahead=true", {}),
    ("local", "replicas=2 accumulate=2 aggregation=local-steps:period=4", {}),
    ("local", "replicas=2", {"times": True}),
    ("new", "replicas=2 aggregation=asynchronous", {"features": frozenset()}),
    ("virtual", "replicas=1..2", {}),
    ("local", "replicas=1..2 partition=disjoint", {}),
    ("local", "replicas=1..2 aggregation=hogwild", {}),
    ("local", "replicas=1..2", {"global_batch": True}),
    ("local", "replicas=1..2", {"on_death": "stop"}),
    ("virtual", "replicas=2", {"on_death": "replace"}),
    ("virtual", "replicas=2", {"on_death": "stop"}),
    ("distributed", "replicas=2 stages=2", {"on_death": "continue"}),
    ("distributed", "replicas=2", {"on_death": "replace"}),
    ("distributed", "replicas=2 shard_parameters=true", {"on_death": "continue"}),
    ("distributed", "replicas=2 compression=fp16", {"on_death": "continue"}),
    ("distributed", "replicas=2 aggregation=local-steps:overlap=2", {"on_death": "continue"}),
    ("distributed", "replicas=2 device=cuda", {"on_death": "continue"}),
    ("distributed", "replicas=2", {"on_death": "continue", "noise_scale": True}),
    ("local", "stages=2 schedule=pipedream", {"on_death": "continue"}),
    ("local", "replicas=2 shards=2 shard_optimizer=true", {"on_death": "replace"}),
    ("local", "replicas=2 aggregation=local-steps:period=4", {"noise_scale": True}),
    ("ray", "replicas=2", {"noise_scale": True}),
    ("distributed", "replicas=2 shard_optimizer=true", {"noise_scale": True}),
    ("distributed", "replicas=2 shard_parameters=true", {"noise_scale": True}),
    ("distributed", "replicas=2 compression=fp16", {"noise_scale": True}),
    ("distributed", "stages=2 schedule=pipedream", {"noise_scale": True}),
    ("local", "replicas=3 aggregation=robust", {"noise_scale": True}),
    ("local", "replicas=3", {"policy": Reduced(Change(2))}),
    ("local", "replicas=3", {"policy": Reduced(held=2)}),
    ("ray", "replicas=3 aggregation=delay-compensated pull_ahead=true", {}),
    ("ray", "replicas=2 compression=fp16 aggregation=sandblaster", {}),
    ("local", "replicas=2 aggregation=sandblaster", {"on_nonfinite": "skip"}),
    ("local", "shards=2 aggregation=hogwild", {}),
    ("local", "stages=2 aggregation=hogwild", {}),
    ("virtual", "replicas=2 aggregation=hogwild", {}),
    ("ray", "replicas=2 aggregation=hogwild", {}),
    ("distributed", "shards=2 compression=fp16", {}),
    ("distributed", "shards=2 shard_parameters=true", {}),
    ("local", "stages=2 shards=2 schedule=pipedream", {}),
    ("local", "stages=2 shards=2 schedule=zero-bubble", {}),
    ("local", "stages=2 shards=2 recompute=all", {}),
    ("local", "stages=[2,1] schedule=zero-bubble", {}),
    ("local", "stages=[2,1] micro_batches=1", {}),
    ("distributed", "stages=2 compression=fp16", {}),
    ("distributed", "stages=2 shard_parameters=true", {}),
    ("virtual", "stages=2 schedule=pipedream", {}),
    ("local", "replicas=2 stages=2 schedule=pipedream", {}),
    ("local", "stages=2 schedule=pipedream aggregation=asynchronous", {}),
    ("local", "stages=2 schedule=pipedream micro_batches=2", {}),
    ("local", "stages=2 schedule=pipedream", {"clip_norm": 1.0}),
    ("local", "stages=2 schedule=pipedream", {"on_nonfinite": "skip"}),
    ("local", "stages=2 schedule=pipedream accumulate=2", {}),
    ("local", "stages=2 schedule=pipedream batchnorm=mini-batch", {}),
    ("ray", "replicas=2 aggregation=synchronous:backups=1 pull_ahead=true", {}),
    ("ray", "replicas=2 aggregation=local-steps:over=asynchronous pull_ahead=true", {}),
    ("ray", "replicas=1..2 aggregation=asynchronous pull_ahead=true", {}),
    ("local", "replicas=2 stages=2 compile=graph", {}),
    ("distributed", "replicas=2 shard_parameters=true compile=true", {}),
    ("local", "stages=2 schedule=pipedream compile=true", {}),
    ("local", "stages=2 schedule=zero-bubble compile=true", {}),
    ("local", "stages=2 recompute=boundaries compile=true", {}),
    ("local", "stages=2 batchnorm=mini-batch compile=true", {}),
    ("distributed", "replicas=2 shard_parameters=true aggregation=local-steps", {}),
    ("distributed", "replicas=2 shard_parameters=true compression=fp16", {}),
    ("distributed", "replicas=2 shard_parameters=true shard_optimizer=false", {}),
    ("distributed", "replicas=2 shard_parameters=true", {"on_nonfinite": "skip"}),
    ("distributed", "replicas=2 shard_parameters=true accumulate=2 aggregation=synchronous:combine=sum", {}),
    ("distributed", "replicas=2 shard_optimizer=true aggregation=local-steps", {}),
    ("distributed", "replicas=2 shard_optimizer=true compression=fp16", {}),
    ("local", "replicas=2 stages=2 shard_optimizer=true aggregation=asynchronous", {}),
    ("distributed", "stages=2 schedule=pipedream shard_optimizer=true", {}),
    ("local", "stages=2 shard_optimizer=true", {}),
    ("new", "replicas=2 device=cuda", {"features": frozenset()}),
    ("new", "stages=2 device=cuda", {"features": frozenset({"stages", "accelerator"})}),
    ("ray", "replicas=2 compression=fp16 aggregation=elastic-averaging", {}),
    ("distributed", "replicas=2 compression=fp16 aggregation=local-steps:overlap=2", {}),
]
"""For each row of the table, in its order, a combination for which it is the first."""


@pytest.mark.parametrize(("row", "case"), list(zip(TABLE, CASES, strict=True)), ids=range(len(TABLE)))
def test_each_row_is_the_first_for_some_combination(row: Row, case: tuple[str, str, dict[str, object]]) -> None:
    engine, strategy, options = case[0], case[1], dict(case[2])
    policy = options.pop("policy", None)
    made = Case.of(Strategy.parse(strategy), engine, **options)
    made = made if policy is None else replace(made, policy=policy)
    assert support.first_row(made) is row
    with pytest.raises(InputError) as refused:
        support.refuse(made)
    sentence = str(refused.value)
    assert not any(field for _, field, _, _ in string.Formatter().parse(sentence) if field)
    assert "; write " in sentence or "; leave " in sentence


@pytest.mark.parametrize("engine", ENGINE_FEATURES)
def test_one_replica_runs_everywhere(engine: str) -> None:
    assert support.first_row(Case.of(Strategy(), engine)) is None


def test_an_engine_that_supports_nothing_special_runs_replicas_in_lockstep() -> None:
    nothing = frozenset[support.Feature]()
    assert support.first_row(Case.of(Strategy(replicas=4), "new", nothing)) is None
    for strategy in ("replicas=2 aggregation=asynchronous", "stages=2", "shards=2", "device=cuda"):
        assert support.first_row(Case.of(Strategy.parse(strategy), "new", nothing)) is not None


README = Path(__file__).parents[1] / "README.md"

START, END = "<!-- support -->\n", "<!-- end of support -->\n"

WHAT_IT_IS = {
    "virtual": "one process, simulated time, real gradients, reproducible",
    "local": "one process for each worker, shared memory, real time",
    "ray": "one actor for each worker and for the server of A, on one host or many",
    "distributed": "the processes that torchrun started, on one host or many; servers of A are threads of some",
}

FEATURES = {
    "`stages`": "replicas=2 stages=2",
    "asynchronous `stages` (PipeDream)": "stages=2 schedule=pipedream",
    "`shards`": "replicas=2 shards=2",
    "`stages` × `shards`": "replicas=2 stages=2 shards=2",
    "`compression`": "replicas=2 compression=fp16",
    "`shard_optimizer` (ZeRO-1), replicas of one worker": "replicas=2 shard_optimizer=true",
    "`shard_optimizer` over replicas of stages or shards": "replicas=2 stages=2 shards=2 shard_optimizer=true",
    "`shard_parameters` (FSDP2)": "replicas=2 shard_parameters=true",
    "`servers=4` (a slice of A each)": "replicas=4 servers=4 aggregation=asynchronous",
    "`standby` (of the server)": "replicas=2 standby=1",
    "`pull_ahead`": "replicas=2 aggregation=asynchronous pull_ahead=true",
    "`device=cuda`": "replicas=2 device=cuda",
    "`stages` on `device=cuda`": "replicas=2 stages=2 device=cuda",
    "`noise_scale=True`": "replicas=2",
    "`replicas=2..8`": "replicas=2..8",
    "`compile=true` (torch.compile), `compile=graph`": "replicas=2 compile=graph",
}
"""Row of the README's table -> strategy that has the feature, with two replicas where it can have them."""


def readme_table() -> str:
    """Return the table of what each engine runs, in Markdown."""
    policies = sorted(registered(Aggregation), key=lambda name: (name != "synchronous", name))
    rows: dict[str, list[str]] = {"what it is": list(WHAT_IT_IS.values())}
    # Policies that run on the same engines share a row.
    for runs, alike in groupby(sorted(policies, key=lambda name: -on_engines(name).count("yes")), on_engines):
        rows[", ".join(sorted(alike))] = list(runs)
    for title, strategy in FEATURES.items():
        rows[title] = supported(strategy, noise_scale=title.startswith("`noise_scale"))
    head = " | ".join(f'`engine="{engine}"`' for engine in WHAT_IT_IS)
    lines = [f"| | {head} |", "|---" * (1 + len(WHAT_IT_IS)) + "|"]
    return "\n".join([*lines, *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items()), ""])


def on_engines(policy: str) -> tuple[str, ...]:
    return tuple(supported(f"replicas=2 aggregation={policy}"))


def supported(strategy: str, **options: bool) -> list[str]:
    cases = (Case.of(Strategy.parse(strategy), engine, **options) for engine in WHAT_IT_IS)
    return ["no" if support.first_row(case) else "yes" for case in cases]


def test_the_readmes_table_is_made_from_the_table() -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    expected = f"{before}{START}{readme_table()}{END}{after}"
    if os.environ.get("PACELINE_REWRITE_GOLDENS"):
        README.write_text(expected, encoding="utf-8")
        return
    assert text == expected
