"""Divided parameters: ranks that hold a part of A compute what one process computes that holds all of it."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import InputError
from paceline.api.train import check
from paceline.engine.distributed.fsdp import units
from paceline.optim.lamb import Lamb
from tests import oracle
from tests.engine import programs
from tests.engine.distributed_cases import ACCUMULATED, STEPS, SYNCHRONISED, kept, program, told
from tests.engine.distributed_sharded_cases import (
    CASES,
    EXACT,
    OVER_ALL_RANKS,
    VIRTUAL,
    Attention,
    Twice,
    wide,
)
from tests.engine.test_distributed_parity import BOUNDS, COUNTS, ROUNDING, assert_equal, assert_same, expected_of
from tests.ranks import Play, cases_of

Started = tuple[int, Path]


def start(play: Play, ranks: int, engine: str, cases: str, folder: Path) -> Started:
    play(Path(__file__).with_name("distributed_sharded_script.py"), engine, cases, size=ranks, folder=folder)
    return ranks, folder


@pytest.fixture(scope="module", params=[2, 4])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Play) -> Started:
    """How many ranks were started on Gloo, and where they left what they found."""
    return start(play, request.param, "distributed:gloo", cases_of(request), tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def on_shm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Play) -> Started:
    """Three ranks on shared memory."""
    return start(play, 3, "distributed:shm", cases_of(request), tmp_path_factory.mktemp("ranks"))


def found(started: Started, name: str) -> dict[str, Any]:
    """What rank 0 has of a run, once it is seen that all ranks have the same."""
    ranks, folder = started
    first, *others = kept(folder, name, ranks)
    for other in others:
        assert_equal(other, first)
    return first


@pytest.mark.parametrize("name", EXACT)
def test_ranks_with_a_part_each_are_one_process(started: Started, name: str) -> None:
    run = found(started, name)
    assert_same(run["state"], expected_of(CASES[name], started[0]), BOUNDS.get(name, ROUNDING))
    assert run["summary"]["updates"] == run["summary"]["steps"] == STEPS


@pytest.mark.parametrize("name", EXACT)
def test_shared_memory_carries_it_too(on_shm: Started, name: str) -> None:
    run = found(on_shm, name)
    assert_same(run["state"], expected_of(CASES[name], on_shm[0]), BOUNDS.get(name, ROUNDING))


def test_accumulated_batches_are_one_larger_batch(started: Started) -> None:
    run = found(started, "accumulated")
    assert_same(run["state"], expected_of(ACCUMULATED["accumulated"], started[0], 3), ROUNDING)


@pytest.mark.parametrize("name", OVER_ALL_RANKS)
def test_batchnorm_over_all_ranks_is_that_of_one_process(started: Started, name: str) -> None:
    model, settings = SYNCHRONISED[name]
    steps = settings.get("steps") or -(-50 // (4 * started[0]))
    assert_same(found(started, name)["state"], oracle.one_process(program(model=model), started[0], steps), ROUNDING)


@pytest.mark.parametrize("name", VIRTUAL)
def test_ranks_do_what_virtual_time_says(started: Started, name: str) -> None:
    """Counts, losses and when they were scored, running means, masks, who leaves early."""
    run, virtual = found(started, name), told(VIRTUAL[name].run(started[0], "virtual"))
    bound = BOUNDS.get(name, ROUNDING)
    assert_same(run["state"], virtual["state"], bound)
    for count in COUNTS:
        assert run["summary"][count] == virtual["summary"][count], count
    for mine, theirs in zip(run["history"], virtual["history"], strict=True):
        # That a loop has ended is known a round later than in virtual time.
        for field in mine.keys() - {"time_s", "threshold" if name == "loop" else ""}:
            near = theirs[field] if theirs[field] is None else pytest.approx(theirs[field], rel=bound, abs=bound)
            assert mine[field] == near, (field, mine, theirs)


@pytest.mark.parametrize("name", [*EXACT, *VIRTUAL][::3])
def test_alone_it_is_plain_training(name: str) -> None:
    run, plain = (told(cases[name].run(1, "distributed")) for cases in (CASES, EXACT | VIRTUAL))
    assert_same(run["state"], plain["state"], 0.0)
    assert run["summary"]["parameter_bytes"] == plain["summary"]["parameter_bytes"]


def test_no_rank_holds_more_than_its_part(started: Started) -> None:
    """Its part of A, of Σ Δ and of Adam's two memories; what layers gather and sum comes and goes within a step."""
    ranks, folder = started
    whole = sum(p.nbytes for p in wide().parameters())
    small = 20_000  # batches, rows, and the last layer's 3 kB, of which some rank has more than others
    for rank, held in enumerate(kept(folder, "memory", ranks)):
        waiting = whole if rank == 0 else 0  # A_0, which rank 0 is to score
        assert 4 * whole / ranks - small < held - waiting < 4 * whole / ranks + small
    parts = found(started, "wide")["summary"]["parameter_bytes"]
    assert sum(parts) == whole
    assert max(parts) - min(parts) < small


def test_the_payload_is_three_times_the_parameters(started: Started) -> None:
    summary = found(started, "wide")["summary"]
    formula = 3 * (started[0] - 1) * sum(summary["parameter_bytes"])
    assert summary["notes"]["payload_sharded_formula_bytes_per_step"] == formula
    # The last layer is small, so in the last unit, which is gathered once: 3 kB less of 3.6 MB for each other rank. Its
    # three rows are filled up to twice the ranks at most, and ranks tell each other how they stand: as little again.
    assert summary["payload_bytes_per_step"] == pytest.approx(formula, rel=0.003)


# ------------------------------------------------------------------------------------------------------------- units


class Plain(nn.Module):
    """A large layer and a small one, and no list."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(60, 60), nn.Linear(6, 3)


class Tied(nn.Module):
    """Two blocks, one with a weight of the embedding's, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])
        self.blocks[1].weight = self.embedding.weight


def kinds(module: nn.Module) -> list[str]:
    return [type(unit).__name__ for unit in units(module)]


def test_members_of_lists_are_units() -> None:
    assert kinds(Twice()) == ["Linear", "Linear", "Twice"]
    assert kinds(Attention()) == ["TransformerEncoderLayer", "TransformerEncoderLayer", "Attention"]


def test_large_layers_are_units() -> None:
    model = Plain()
    assert units(model) == [model.large, model]


def test_a_tied_weight_is_in_the_unit_that_holds_all_its_places() -> None:
    model = Tied()
    assert units(model) == [model.blocks[0], model.blocks[2], model]


# ----------------------------------------------------------------------------------------------------------- refusals


class Scaled(nn.Module):
    """An MLP behind a parameter of its own."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale, self.shift, self.rest = nn.Parameter(scale), nn.Parameter(torch.zeros(6).double()), programs.mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x * self.scale.double() + self.shift)


def scalar() -> nn.Module:
    return Scaled(torch.tensor(1.0).double())


def mixed() -> nn.Module:
    return Scaled(torch.ones(6))


class Looked(nn.Module):
    """Adds a row that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.rest = nn.Embedding(4, 6, sparse=True), programs.mlp()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x + self.rows(torch.zeros(1, dtype=torch.int64)))


def refused(match: str, words: str = "", fields: dict[str, Any] | None = None, **settings: Any) -> None:
    strategy = f"replicas=1 shard_parameters=true {words}"
    with pytest.raises(InputError, match=match):
        check(programs.program(**fields or {}), strategy, engine="distributed", **{"steps": 1} | settings)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("compression=bf16", "and compression=bf16 all of Δ at once; leave one of them out"),
        ("shard_optimizer=false", "divides the optimizer's state as well, .* leave shard_optimizer out"),
        ("accumulate=2 aggregation=synchronous:combine=sum", "its accumulate=2 batches .* write combine=mean"),
    ],
)
def test_options_that_do_not_go_together(words: str, match: str) -> None:
    refused(match, words)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"optimizer": functools.partial(Lamb, lr=0.01)}, "Lamb may .* write shard_optimizer=true .* one of .*AdamW"),
        ({"model": scalar}, "parameter scale is a single number, .* write torch.nn.Parameter"),
        ({"model": mixed}, r"of Scaled .* several dtypes \(scale is float32, shift is float64\); put them into"),
        ({"model": Looked}, "rows has sparse gradients, .* write nn.Embedding"),
    ],
)
def test_programs_that_can_not_be_divided(fields: dict[str, Any], match: str) -> None:
    refused(match, fields=fields)


def test_a_bad_delta_can_not_be_taken_out() -> None:
    refused("on_nonfinite='skip' discards a bad Δ, but .* write on_nonfinite='stop'", on_nonfinite="skip")


def test_that_it_divides_the_optimizer_may_be_said() -> None:
    check(programs.program(), "shard_parameters=true shard_optimizer=true", engine="distributed", steps=1)
