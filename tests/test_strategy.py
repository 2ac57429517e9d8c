"""A strategy as a value, as a line of text and as a table."""

import contextlib
import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.aggregation import Buffered, SmoothSwitch, Synchronous, text_of
from paceline.comm.shared_pickle import object_of, parts_of
from paceline.compression.base import Stateless
from paceline.core.data_order import Partition
from paceline.core.errors import InputError
from paceline.core.registry import family_of, register
from paceline.schedule.base import Action, Schedule
from paceline.strategy import Recompute, Strategy
from tests.aggregation.policy_values import policies
from tests.comm.compression_values import compressions
from tests.schedule.schedule_values import TEXTS as SCHEDULES

CHECK = settings(max_examples=200, deadline=None, derandomize=True)
SIZES = st.integers(1, 64)
PATTERNS = st.from_regex(r"(?:[a-z0-9_.*?-]|\[!?[a-z0-9-]+\])+", fullmatch=True)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    widths = draw(st.lists(SIZES, min_size=1, max_size=4))
    count = len(widths)
    return Strategy(
        replicas=draw(SIZES),
        stages=draw(st.just(count) | st.just(tuple(widths))),
        shards=draw(SIZES | st.tuples(*[SIZES] * count)),
        schedule=draw(st.sampled_from(SCHEDULES)),
        micro_batches=draw(st.none() | SIZES),
        shard_rules=draw(st.dictionaries(PATTERNS, st.sampled_from(("column", "row", "whole")), max_size=3)),
        recompute=draw(st.sampled_from(get_args(Recompute))),
        aggregation=draw(policies()),
        accumulate=draw(SIZES),
        partition=draw(st.sampled_from(get_args(Partition))),
        threads=draw(st.none() | SIZES),
        device=draw(st.sampled_from(["cpu", "cuda", "xpu", "auto"])),
        compression=text_of(draw(compressions())),
        shard_optimizer=draw(st.none() | st.booleans()),
        shard_parameters=draw(st.booleans()),
        compile=draw(st.sampled_from((False, True, "graph"))),
    )


@CHECK
@given(strategies())
def test_parse_undoes_print(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy
    assert str(Strategy.parse(str(strategy))) == str(strategy)


@CHECK
@given(strategies())
def test_toml_there_and_back(strategy: Strategy) -> None:
    assert Strategy.from_toml(strategy.to_toml()) == strategy


CANONICAL = [
    (Strategy(), "replicas=1"),
    (Strategy(replicas=4, aggregation=SmoothSwitch(every=500)), "replicas=4 aggregation=smooth-switch"),
    (Strategy(2, aggregation="buffered:k=2"), "replicas=2 aggregation=buffered:k=2"),
    (Strategy(stages=(3, 1), shards=2), "replicas=1 stages=[3,1] shards=2"),
    (Strategy(2, compression="powersgd:rank=2"), "replicas=2 compression=powersgd:rank=2"),
    (Strategy(stages=2, schedule="interleaved:chunks=4"), "replicas=1 stages=2 schedule=interleaved:chunks=4"),
    (
        Strategy(shards=2, shard_rules={"*.c_fc": "column", "head": "whole"}),
        "replicas=1 shards=2 shard_rules=*.c_fc:column,head:whole",
    ),
    (Strategy(8, threads=1, shard_optimizer=False), "replicas=8 threads=1 shard_optimizer=false"),
    (Strategy(2, compile=True), "replicas=2 compile=true"),
    (Strategy(2, compile="graph"), "replicas=2 compile=graph"),
    (
        Strategy(4, 2, micro_batches=8, schedule="gpipe", partition="disjoint", accumulate=2, shard_parameters=True),
        "replicas=4 stages=2 schedule=gpipe micro_batches=8 accumulate=2 partition=disjoint shard_parameters=true",
    ),
]


@pytest.mark.parametrize(("strategy", "text"), CANONICAL)
def test_canonical_text(strategy: Strategy, text: str) -> None:
    assert str(strategy) == text
    assert Strategy.parse(text) == strategy


FREE = [
    ("  aggregation=synchronous\n replicas=1 ", "replicas=1"),
    ("stages=[3, 1]", "replicas=1 stages=[3,1]"),
    ("threads=auto micro_batches=auto shard_optimizer=auto", "replicas=1"),
    ("compression=powersgd:rank=4", "replicas=1 compression=powersgd"),
    ("compression=top-k:ratio=1e-3", "replicas=1 compression=top-k:ratio=0.001"),
    ("shard_rules=h.[0-3].*:row,head:whole,", "replicas=1 shard_rules=h.[0-3].*:row,head:whole"),
    ("schedule=interleaved:chunks=2", "replicas=1 schedule=interleaved"),
    ("schedule=1f1b device=cpu compression=none recompute=none", "replicas=1"),
]


@pytest.mark.parametrize(("text", "canonical"), FREE)
def test_reading_is_more_liberal_than_printing(text: str, canonical: str) -> None:
    assert str(Strategy.parse(text)) == canonical


def test_the_designs_example() -> None:
    text = "replicas=4 stages=2 schedule=1f1b micro_batches=8 aggregation=smooth-switch:every=500"
    built = Strategy(replicas=4, stages=2, schedule="1f1b", micro_batches=8, aggregation=SmoothSwitch(every=500))
    assert Strategy.parse(text) == built
    assert hash(Strategy.parse(text)) == hash(built)


def test_aggregation_is_a_policy_however_it_was_given() -> None:
    assert Strategy(aggregation="synchronous") == Strategy(aggregation=Synchronous()) == Strategy()
    assert Strategy(aggregation="buffered:k=2").aggregation == Buffered(k=2)
    assert dataclasses.replace(Strategy(3), aggregation="buffered").aggregation == Buffered()
    assert pickle.loads(pickle.dumps(Strategy(aggregation="buffered"))) == Strategy(aggregation=Buffered())


def test_classes_of_ones_own_travel_with_the_text_that_names_them() -> None:
    """As into a worker, which has imported the package and nothing else."""

    @dataclasses.dataclass(frozen=True)
    class Backwards(Schedule):
        def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
            for i in reversed(range(micro_batches)):
                yield from (Action(worker, "forward", i), Action(worker, "backward", i))

    @dataclasses.dataclass(frozen=True)
    class Signs(Stateless):
        scale: float = 1.0

        def all_reduce(self, state: None, gradient: Any, group: Any) -> int:
            return 0

    @dataclasses.dataclass(frozen=True)
    class Patient(Buffered):
        pass

    own = {"backwards": Backwards, "signs": Signs, "patient": Patient}
    families = {name: family_of(cls) for name, cls in own.items()}
    with contextlib.ExitStack() as undo:
        for name, cls in own.items():
            register(name)(cls)
            undo.callback(families[name].entries.pop, name)  # type: ignore[union-attr]
        strategy = Strategy.parse("schedule=backwards compression=signs:scale=2 aggregation=patient:k=3")
        text, parts = str(strategy), [bytes(part) for part in parts_of(strategy)]
        for name, family in families.items():
            del family.entries[name]  # type: ignore[union-attr]
        for _ in range(2):  # a worker may receive it again
            received = object_of(parts)
            assert str(received) == text
            assert received == Strategy.parse(text)
            assert type(received.order).__name__ == "Backwards"


def test_shard_rules_are_a_mapping_however_they_were_given() -> None:
    given = Strategy(shards=2, shard_rules="*.c_fc:column,head:whole")
    assert given == Strategy(shards=2, shard_rules={"*.c_fc": "column", "head": "whole"})
    assert dict(given.shard_rules) == {"*.c_fc": "column", "head": "whole"}
    assert given != Strategy(
        shards=2, shard_rules={"head": "whole", "*.c_fc": "column"}
    )  # the last that matches counts
    assert pickle.loads(pickle.dumps(given)) == given
    assert hash(given) == hash(dataclasses.replace(given))


def test_coerce() -> None:
    strategy = Strategy(replicas=3)
    assert Strategy.coerce(strategy) is strategy
    assert Strategy.coerce("replicas=3") == strategy


def test_strategies_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Strategy().aggregation = Buffered()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "workers", "stages"),
    [
        ("replicas=4", 4, (1,)),
        ("replicas=2 stages=3 shards=2", 12, (2, 2, 2)),
        ("replicas=2 stages=[3,1]", 8, (3, 1)),
        ("stages=[3,1] shards=[1,4]", 7, (3, 4)),
        ("stages=2 shards=[2,1]", 3, (2, 1)),
    ],
)
def test_mesh(text: str, workers: int, stages: tuple[int, ...]) -> None:
    strategy = Strategy.parse(text)
    assert (strategy.workers, strategy.stage_workers, strategy.stage_count) == (workers, stages, len(stages))


def test_lists_are_as_good_as_tuples() -> None:
    assert Strategy(stages=[3, 1]) == Strategy(stages=(3, 1))  # type: ignore[arg-type]


def test_toml_is_a_flat_table() -> None:
    text = Strategy(4, (3, 1), aggregation="local-steps:over=(buffered:k=2)").to_toml()
    assert text.splitlines()[:4] == ["replicas = 4", "stages = [3,1]", "shards = 1", 'schedule = "1f1b"']
    assert 'aggregation = "local-steps:over=(buffered:k=2)"' in text
    assert "threads" not in text


WRONG = [
    (
        "replicas=4, aggregation=asynchronous",
        "comma .* two fields; .* write 'replicas=4 aggregation=asynchronous'",
    ),
    ("aggregation=buffered:k=2,combine=sum,replicas=4", "write 'aggregation=buffered:k=2,combine=sum replicas=4'"),
    ("cuts=a,b; replicas=2", "write 'cuts=a,b replicas=2'"),
    ("replica=4", "unknown strategy field 'replica'; did you mean 'replicas'"),
    ("auto", "strategy=auto is chosen for a program"),
    ("replicas", "'replicas' gives replicas no value; write replicas="),
    ("replicas=", "write replicas="),
    ("=4", "unknown strategy field ''"),
    ("replicas=4 replicas=5", "says replicas twice"),
    ("replicas=0", "replicas=0, but it must be a whole number of at least 1; write replicas=1"),
    ("replicas=four", "replicas=four, but it must be a whole number"),
    ("replicas=auto", "replicas=auto"),
    ("replicas=[2,2]", "replicas="),
    ("stages=0", "stages=0"),
    ("stages=[3,0]", "stages=0"),
    ("stages=[]", "stages="),
    ("stages=3 shards=[1,2]", r"shards=\[1,2\] is for 2 stages, but stages=3 makes 3; write stages=2"),
    ("micro_batches=0", "micro_batches=0"),
    ("threads=0", "threads=0"),
    ("accumulate=0", "accumulate=0"),
    ("", "strategy='' says nothing; write replicas=1"),
    (" ", "strategy=' ' says nothing; write replicas=1"),
    (
        "replicas=99999999999999",
        "replicas=99999999999999, but it can be 1,000,000 at most; write replicas=1000000 or less",
    ),
    ("replicas=1..99999999999999", "it can be 1,000,000 at most"),
    ("stages=99999999999999", "stages=99999999999999, but it can be 1,000,000 at most"),
    ("schedule=1b1f", "unknown schedule '1b1f'; did you mean '1f1b'"),
    ("schedule=interleaved:chunks=1", "interleaved:chunks=1, but it must be a whole number of at least 2; write"),
    ("schedule=gpipe:chunks=2", "unknown option of gpipe 'chunks'"),
    ("partition=disjunct", "did you mean 'disjoint'"),
    ("shard_rules=head", "'head' in shard_rules is no rule; write <pattern>:<way>"),
    ("shard_rules=head:", "'head:' in shard_rules is no rule"),
    ("shard_rules=head:row,head:column", "shard_rules says head twice; write head:column once"),
    ("shard_rules=h/0:row", "'h/0' in shard_rules is no pattern over module names"),
    ("shard_rules=head:a.b", "names no way"),
    ("recompute=some", "unknown recompute 'some'"),
    ("device=cuda:1", "device='cuda:1' is no type of device"),
    ("compression=topk", "did you mean 'top-k'"),
    (
        "compression=powersgd:rank=0",
        "powersgd:rank=0, but it must be a whole number of at least 1; write powersgd:rank=1",
    ),
    ("compression=powersgd:ratio=2", "unknown option of powersgd 'ratio'; known: rank"),
    (
        "compression=top-k:ratio=0",
        "top-k:ratio=0.0, but it must be a number above 0 and up to 1; write top-k:ratio=0.01",
    ),
    ("compression=top-k:ratio=1.5", "top-k:ratio=1.5, but it must be a number above 0 and up to 1"),
    ("compression=fp16:rank=1", "unknown option of fp16 'rank'"),
    ("aggregation=asynchronos", "did you mean 'asynchronous'"),
    ("replicas=2 asynchronous", "asynchronous is a policy, not a strategy field; write aggregation=asynchronous"),
    ("smooth-switch:every=100", "smooth-switch is a policy, .*; write aggregation=smooth-switch:every=100"),
    ("xyz=2", "unknown strategy field 'xyz'; known: accumulate, aggregation, "),
    ("shard_parameters=yes", "shard_parameters=yes, but it must be true or false"),
    ("compile=1", "unknown compile '1'"),
    ("shard_optimizer=1", "shard_optimizer=1"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_wrong_text(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Strategy.parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": "4"}, "replicas=4"),
        ({"replicas": True}, "replicas=True"),
        ({"stages": ()}, "stages="),
        ({"stages": 1.5}, "stages=1.5"),
        ({"aggregation": 3}, "aggregation=3 is no policy"),
        ({"compression": None}, "compression=None is no text; write compression='none'"),
        ({"shard_rules": {"a,b": "row"}}, "'a,b' in shard_rules is no pattern"),
        ({"shard_rules": {"a": 3}}, "names no way"),
        ({"shard_rules": 3}, "shard_rules=3 is no mapping"),
        ({"schedule": "gpip"}, "did you mean 'gpipe'"),
        ({"schedule": None}, "schedule=None is no text; write schedule='1f1b'"),
        ({"shard_optimizer": "no"}, "shard_optimizer=no"),
        ({"shard_parameters": None}, "shard_parameters=None"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Strategy(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [("replicas = ", "no TOML"), ("replica = 2", "did you mean 'replicas'"), ("replicas = 0", "write replicas=1")],
)
def test_wrong_toml(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Strategy.from_toml(text)
