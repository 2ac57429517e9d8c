"""How operators are divided, without training: what the table says is what is held and what is sent."""

import functools
import json
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline import InputError, Program, Strategy, show_shards, train
from paceline.api.show import sharding_of
from paceline.engine.base import Budget, Job
from paceline.engine.run_context import first_batch
from paceline.replica import hybrid
from paceline.replica.hybrid import StagedSharding
from paceline.replica.pipeline.prepare import PartRun, cut_as_named, first_rows, run_parts
from paceline.replica.tensor.prepare import plan_program
from paceline.replica.tensor.rewrite import rewrite_for_shard
from paceline.replica.tensor.sharding_plan import ShardingPlan
from paceline.replica.tensor.sharding_report import ShardingReport
from paceline.replica.tensor.tp_group import TPCollectives
from tests.replica.tensor.cases import own
from tests.replica.tensor.threads import together

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Unruled(nn.Module):
    """Has an operator that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.bend = nn.Bilinear(8, 8, 8)
        self.up = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.up(self.bend(x, x).relu())
        return made


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 32, 0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Linear(4, 8), layer, nn.Flatten(1), nn.Linear(16, 2))


def cnn() -> nn.Module:
    image = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 1), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(image, nn.Conv2d(6, 4, 1), nn.Flatten(1), nn.Linear(16, 2))


MODELS = {"mlp": mlp, "encoder": encoder, "cnn": cnn, "unruled": Unruled}


def program(model: Callable[[], nn.Module] = mlp, batch_size: int = 16) -> Program:
    draw = torch.Generator().manual_seed(0)
    data, classes = torch.randn(64, 8, generator=draw), torch.randint(2, (64,), generator=draw)
    return Program(
        model=model, loss=nn.functional.cross_entropy, optimizer=SGD, train=(data, classes), batch_size=batch_size
    )


def cuts(shown: ShardingReport) -> dict[tuple[str, str], str]:
    return {(row.module, row.operator): row.cut for row in shown.rows if "→" not in row.cut}


def whys(shown: ShardingReport) -> dict[tuple[str, str], str]:
    return {(row.module, row.operator): row.why_whole for row in shown.rows if row.why_whole}


def test_a_pair_of_layers_is_cut_by_column_and_by_row_and_sends_once_each_way() -> None:
    shown = sharding_of(program(), "shards=2 shard_rules=3:whole")
    assert cuts(shown)["0", "linear"] == "column"
    assert cuts(shown)["2", "linear"] == "row"
    assert whys(shown)["3", "layer_norm"] == "shard_rules say so"
    [after] = [row for row in shown.rows if (row.module, row.cut) == ("2", "partial → whole")]
    assert (after.forward, after.backward, after.collectives) == ("all-reduce", "", 1)
    assert after.sent_bytes == 16 * 8 * 4  # all of 16 samples of 8 floats: 2 · (k - 1)/k of them


def test_bytes_are_those_of_the_programs_batch() -> None:
    sent = [
        sharding_of(program(batch_size=size), "shards=2 shard_rules=3:whole,4:row").sent_bytes for size in (8, 16, 32)
    ]
    assert sent[0] > 0
    assert sent[2] - sent[1] == 2 * (sent[1] - sent[0]) > 0


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_what_it_says_is_what_shards_hold_and_do(name: str, k: int) -> None:
    given = program(MODELS[name])
    shown = sharding_of(given, f"shards={k}")
    batch = first_batch(Job(given, Strategy(shards=k), Budget("steps", 1, 1)))
    captured, made = plan_program(given, given.build(), batch, k)
    inputs = captured.flatten((batch.input, batch.target))

    def work(shards: TPCollectives) -> int:
        shard = own(rewrite_for_shard(made, shards))
        (loss,) = shard.module(*inputs)
        loss.backward()
        return sum(parameter.numel() for parameter in shard.module.parameters())

    held, calls = together(k, work)
    assert tuple(held) == shown.parameters_by_shard
    at_the_end = sum(row.collectives for row in shown.rows if row.operator.endswith(" gradients"))
    assert calls.total() == shown.collectives - at_the_end
    assert sum(row.parameters for row in shown.rows) == shown.parameters == sum(
        parameter.numel() for parameter in given.build().parameters()
    )  # fmt: skip


def test_a_run_keeps_to_its_rules_and_holds_what_the_table_says() -> None:
    strategy = "shards=2 shard_rules=0:row,4:whole"
    shown = sharding_of(program(), strategy)
    assert (cuts(shown)["0", "linear"], cuts(shown)["4", "linear"]) == ("row", "whole")
    run = train(program(), strategy, steps=1, progress=False)
    assert run.summary["parameter_bytes"] == [4 * held for held in shown.parameters_by_shard]


STAGES = "stages=2 cuts=2 shards=2 micro_batches=4 shard_rules=3:whole"


@pytest.mark.parametrize(("name", "strategy"), [("mlp", STAGES), ("cnn", "stages=2 cuts=1 shards=2 micro_batches=4")])
def test_what_it_says_of_each_stage_is_what_its_shards_hold_and_do(name: str, strategy: str) -> None:
    """A batch is four micro-batches; what is summed at its end is summed once."""
    made, asked = program(MODELS[name]), Strategy.parse(strategy)
    shown = shards_of(made, strategy)
    module, batch = made.build(), first_batch(Job(made, asked, Budget("steps", 1, 1)))
    cut = cut_as_named(made, asked, module, batch)
    leaves = cut.captured.flatten(first_rows(asked, batch))
    plans = hybrid.plan_parts(hybrid.ShardingRequest(made, cut, module, leaves, [2, 2], asked.shard_rules))
    runs = run_parts(cut, leaves)
    for stage, plan, run in zip(shown.stages, plans, runs, strict=True):
        assert stage.sharding is not None
        assert plan is not None
        held, calls = together(2, functools.partial(forward_and_backward, plan, run))
        assert tuple(held) == stage.sharding.parameters_by_shard
        summed = [row for row in stage.sharding.rows if row.operator.endswith(" gradients")]
        assert 4 * calls.total() == stage.sharding.collectives - sum(row.collectives for row in summed)
        assert stage.parameters == sum(row.parameters for row in stage.sharding.rows) == stage.sharding.parameters
    assert sum(stage.parameters for stage in shown.stages) == sum(p.numel() for p in made.build().parameters())


def forward_and_backward(plan: ShardingPlan, run: PartRun, shards: TPCollectives) -> int:
    """Of a part, once: how many elements of parameters a shard holds."""
    shard = own(rewrite_for_shard(plan, shards))
    given = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in run.arguments]
    made = [each for each in shard.module(*given) if each.requires_grad]
    torch.autograd.backward(made, [torch.ones_like(each) for each in made])
    return sum(parameter.numel() for parameter in shard.module.parameters())


def shards_of(made: Program, strategy: str) -> StagedSharding:
    shown = sharding_of(made, strategy)
    assert isinstance(shown, StagedSharding)
    return shown


def test_a_stage_of_one_worker_is_said_to_be_whole() -> None:
    shown = shards_of(program(), STAGES.replace("shards=2", "shards=[2,1]"))
    assert [stage.sharding is None for stage in shown.stages] == [False, True]
    assert str(shown).startswith("stage 0: 2 shards; bytes: what a shard sends for one batch")
    assert str(shown).endswith("\n\nstage 1: whole, with 554 parameters")
    read = json.loads(json.dumps(shown.to_json()))["stages"]
    assert [(each["stage"], each["shards"]) for each in read] == [(0, 2), (1, 1)]


def test_who_take_turns_at_a_stage_send_less_each() -> None:
    alone, turns = (
        shards_of(program(), f"stages={stages} cuts=2 micro_batches=4 shards=2").stages[0].sharding
        for stages in ("2", "[2,1]")
    )
    assert alone is not None
    assert turns is not None
    assert alone.sent_bytes == 2 * turns.sent_bytes > 0


def test_branches_of_a_stage_are_balanced_without_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("somebody measures")

    monkeypatch.setattr("paceline.replica.tensor.prepare.measure_op_times", measured)
    given = program(lambda: nn.Sequential(nn.Linear(8, 8), Fork(), nn.Linear(12, 2)))
    shown = shards_of(given, "stages=2 cuts=2 shards=[2,1] shard_rules=1.b*:branch")
    assert shown.stages[0].sharding is not None
    ways = {row.cut for row in shown.stages[0].sharding.rows if row.module.startswith("1.b")}
    assert ways == {"branch on shard 0", "branch on shard 1"}


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b1, self.b2 = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.b1(x), self.b2(x)], 1)


def test_what_stays_whole_says_why() -> None:
    assert whys(sharding_of(program(Unruled), "shards=2"))["bend", "bilinear"] == "no rule for bilinear"
    assert whys(sharding_of(program(encoder), "shards=3"))["2.self_attn", "scaled_dot_product_attention"] == (
        "2 heads can't be divided among 3"
    )
    narrow = program(lambda: nn.Sequential(nn.Linear(8, 9), nn.Unflatten(1, (3, 3)), nn.Conv1d(3, 3, 1, groups=3),
                                           nn.Flatten(1), nn.Linear(9, 2)))  # fmt: skip
    assert whys(sharding_of(narrow, "shards=4"))["2", "conv1d"] == "3 groups can't be divided among 4"
    assert whys(sharding_of(program(encoder), "shards=2 shard_rules=2.linear1:whole"))["2.linear1", "linear"] == (
        "shard_rules say so"
    )


def test_the_text_has_each_row_and_what_they_come_to() -> None:
    shown = sharding_of(program(), "shards=2")
    lines = str(shown).splitlines()
    assert lines[0] == "2 shards; bytes: what a shard sends for one batch, forward and backward"
    assert lines[2].startswith("module  operator  ")
    assert [re.split(r"  +", line.strip())[-1] for line in lines[3:5]] == ["576", "520"]
    assert len(lines) == 3 + len(shown.rows) + 4
    assert lines[-3].startswith("divided: ")
    assert lines[-2].startswith(f"a step: {shown.collectives} collectives, ")
    assert lines[-1] == f"parameters by shard: {', '.join(map(str, shown.parameters_by_shard))}"


def test_json_has_the_same_rows_in_plain_types() -> None:
    shown = sharding_of(program(), "shards=2")
    read = json.loads(json.dumps(shown.to_json()))
    assert [row["cut"] for row in read["rows"]] == [row.cut for row in shown.rows]
    assert read["sent_bytes"] == shown.sent_bytes == sum(row["sent_bytes"] for row in read["rows"])
    assert read["parameters_by_shard"] == list(shown.parameters_by_shard)


@pytest.mark.usefixtures("two_threads")
def test_this_process_is_left_as_it_was() -> None:
    made = program()
    torch.manual_seed(5)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(5)
    show_shards(made, "shards=2 threads=1")
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)  # the same numbers, bit for bit
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("replicas=1", "shards=1 leaves the operators whole, so nothing is divided; write shards=2"),
        ("shard_rules=0:row", "shard_rules=0:row say how operators are divided, but shards=1 leaves them whole"),
        ("stages=2 cuts=2 shards=100", "shards=100: nothing of stage 0 can be divided into 100"),
        ("stages=2 cuts=2 shards=[2,1] shard_rules=nowhere:row", "unknown module in shard_rules 'nowhere'"),
        ("shards=2 aggregation=hogwild", "aggregation=hogwild"),
        ("shards=2 shard_rules=nowhere:row", "unknown module in shard_rules 'nowhere'"),
        ("shards=100", "nothing of Sequential can be divided into 100"),
    ],
)
def test_what_train_would_refuse_is_refused(strategy: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        show_shards(program(), strategy)
