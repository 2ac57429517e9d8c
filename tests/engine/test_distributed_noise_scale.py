"""Ranks tell of the noise in their gradients what virtual time tells, each the same."""

from pathlib import Path

import pytest
import torch

from paceline import InputError, Strategy, support
from paceline.engine.distributed.rank_status import FIELDS, NORMS, DeltaNorm, RankStatus, StatusKind
from paceline.support import Case
from tests.engine.distributed_cases import kept
from tests.engine.noise_cases import CASES, KEYS, OVERLAPPED
from tests.ranks import Play, cases_of

ROUNDING = 1e-7
"""Gradients that differ in their last bits, from micro-batches and shards that add in another order, 14 steps of Adam,
which divides by their size, and differences of norms that are alike."""


@pytest.fixture(scope="module", params=[2, 4])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Play) -> tuple[int, Path]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    play(Path(__file__).with_name("noise_scale_script.py"), cases_of(request), size=request.param, folder=folder)
    return request.param, folder


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "") for name in CASES), *((name, ", in buckets") for name in OVERLAPPED)]
)
def test_ranks_tell_what_virtual_time_tells(started: tuple[int, Path], name: str, how: str) -> None:
    ranks, folder = started
    first, *others = kept(folder, name + how, ranks)
    assert (first["summary"]["notes"].get("buckets", 0) > 1) == bool(how)
    for other in others:
        assert other["history"] == first["history"]
        assert other["summary"] == first["summary"]
    expected = CASES[name].run(ranks // CASES[name].workers, "virtual")
    assert expected.summary["noise_scale_mean"] is not None
    for key in ("noise_scale", "noise_scale_mean", "noise_scale_error", "noise_scale_biased", "efficiency"):
        assert first["summary"][key] == pytest.approx(expected.summary[key], rel=ROUNDING), key
    assert first["summary"]["goodput_samples_per_s"] > 0
    for row, record in zip(first["history"], expected.history, strict=True):
        known = {key: value for key in KEYS if (value := record.row()[key]) is not None}
        assert {key: row[key] for key in KEYS if row[key] is not None} == pytest.approx(known, rel=ROUNDING)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-15), (torch.float32, 1e-13)])
@pytest.mark.parametrize("norm", [DeltaNorm(), DeltaNorm(1 / 3, 4, 2e30, 1e-30, 70_000), DeltaNorm(7.0, 1, 2e60)])
def test_norms_come_back_from_the_table(norm: DeltaNorm, dtype: torch.dtype, bound: float) -> None:
    """A length keeps 48 bits in two float32, so its square is known to 2·2^-48, and in float64 to some last bits."""
    row = RankStatus(StatusKind.delta, 8, True, False, 0.5, 9, norm)
    encoded = torch.tensor(row.encode(), dtype=dtype)
    assert len(encoded) == FIELDS + NORMS
    found = RankStatus.decode(encoded.tolist(), norms=True)
    assert found._replace(norm=norm) == row
    assert found.norm == pytest.approx(norm, rel=bound)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("replicas=2 shard_optimizer=true", "shard_optimizer=True each rank has a part"),
        ("replicas=2 shard_parameters=true", "shard_parameters=True each rank has a part"),
        ("replicas=2 compression=bf16", "compression=bf16 changes what is summed"),
        ("stages=2 micro_batches=2 schedule=pipedream", "each stage moves its weights by itself"),
    ],
)
def test_where_norms_are_nobodys_it_is_refused(strategy: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        support.refuse(Case.of(Strategy.parse(strategy), "distributed", noise_scale=True))
