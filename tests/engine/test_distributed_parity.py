"""Ranks under torchrun compute what one process computes, and what virtual time says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import oracle
from tests.engine.distributed_cases import (
    ACCUMULATED,
    CASES,
    LIKE_VIRTUAL,
    LOCAL_STEPS,
    ONE_PROCESS,
    SHARDED,
    STEPS,
    SYNCHRONISED,
    Case,
    ended,
    kept,
    program,
    told,
    torchrun,
)
from tests.ranks import Play

ROUNDING = 1e-12
"""Both sides add the same products in another order: some hundred rounding errors of 2e-16 each, over 13 steps."""

NORMALISED = 1e-9
"""Optimizers that divide a gradient by its own size make its relative error theirs, also where it is nearly zero."""

BOUNDS = {
    "adam": NORMALISED,
    "groups": NORMALISED,
    "lamb": NORMALISED,
    "all of them": NORMALISED,
    "an outer optimizer": NORMALISED,
    "two dtypes": 1e-5,  # float32 rounds at 6e-8, over 13 steps with momentum
    "half precision": 2.0**-6,  # bfloat16 rounds at 2^-9, in each of 13 steps
    "autocast": 2.0**-9,  # the same bfloat16 products, but a last bit of A may turn one of them over
}

COUNTS = ("updates", "gradients", "applied", "discarded", "nonfinite", "steps", "staleness", "start_digest")


@pytest.fixture(scope="module", params=[2, 3, 4])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Play) -> tuple[int, Path]:
    """How many ranks were started, three of them by torchrun, and where they left what they found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("distributed_parity_script.py")
    if request.param != 3:
        play(script, size=request.param, folder=folder)
        return request.param, folder
    process = torchrun(script, ranks=request.param, folder=folder)
    said = ended(process)
    assert process.returncode == 0, said
    return request.param, folder


def found(started: tuple[int, Path], name: str) -> dict[str, Any]:
    """What rank 0 has of a run, once it is seen that all ranks have the same."""
    ranks, folder = started
    first, *others = kept(folder, name, ranks)
    for other in others:
        assert_equal(other, first)
    return first


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """To the bit."""
    torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)
    torch.testing.assert_close(one["model"], other["model"], rtol=0, atol=0)
    assert one["history"] == other["history"]
    assert one["summary"] == other["summary"]
    assert one["spans"] == other["spans"]


def assert_same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    assert state.keys() >= expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=bound, atol=bound, msg=lambda text, n=name: f"{n}: {text}")


def expected_of(case: Case, ranks: int, accumulate: int = 1) -> dict[str, torch.Tensor]:
    return oracle.one_process(case.program, ranks, STEPS, accumulate)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_ranks_in_lockstep_are_one_process(started: tuple[int, Path], name: str) -> None:
    run = found(started, name)
    assert_same(run["state"], expected_of(CASES[name], started[0]), BOUNDS.get(name, ROUNDING))
    assert run["summary"]["updates"] == run["summary"]["steps"] == STEPS


@pytest.mark.parametrize("name", SHARDED)
def test_a_divided_optimizer_is_a_whole_one(started: tuple[int, Path], name: str) -> None:
    run = found(started, name)
    bound = BOUNDS.get(name.removeprefix("sharded "), ROUNDING)
    assert_same(run["state"], expected_of(CASES[name], started[0]), bound)


def test_a_compression_that_leaves_nothing_out_changes_nothing(started: tuple[int, Path]) -> None:
    run = found(started, "all that is largest")
    assert_same(run["state"], expected_of(CASES["momentum"], started[0]), ROUNDING)
    own = found(started, "all of local steps"), found(started, "local steps")
    assert_same(own[0]["state"], own[1]["state"], ROUNDING)
    skipped = found(started, "skipped and compressed"), found(started, "skipped")
    assert_same(skipped[0]["state"], skipped[1]["state"], ROUNDING)


def test_bf16_sends_a_quarter_of_float64_and_trains_nearly_the_same(started: tuple[int, Path]) -> None:
    run, whole = found(started, "bf16"), found(started, "momentum")
    # bfloat16 rounds each gradient at 2^-9, and error feedback gives back what is lost.
    assert_same(run["state"], whole["state"], 2.0**-6)
    assert any(not torch.equal(run["state"][n], whole["state"][n]) for n in whole["state"])
    ranks, size = started[0], whole["summary"]["parameter_bytes"][0]
    rows = whole["summary"]["payload_bytes_per_step"] - 2 * (ranks - 1) * size
    sent = run["summary"]["payload_bytes_per_step"] - rows
    assert sent == pytest.approx(2 * (ranks - 1) * size / 4, rel=0.02)  # each rank's ring is rounded up to a byte


def test_accumulated_batches_are_one_larger_batch(started: tuple[int, Path]) -> None:
    run = found(started, "accumulated")
    assert_same(run["state"], expected_of(ACCUMULATED["accumulated"], started[0], 3), ROUNDING)


@pytest.mark.parametrize("name", SYNCHRONISED)
def test_batchnorm_over_all_ranks_is_that_of_one_process(started: tuple[int, Path], name: str) -> None:
    """Uneven last batches among them: with three ranks, one of 2 samples for all."""
    model, settings = SYNCHRONISED[name]
    run, ranks = found(started, name), started[0]
    steps = settings.get("steps") or -(-50 // (4 * ranks))
    assert_same(run["state"], oracle.one_process(program(model=model), ranks, steps), ROUNDING)


@pytest.mark.parametrize("name", [*ONE_PROCESS, *ACCUMULATED, *LIKE_VIRTUAL, *LOCAL_STEPS])
def test_ranks_do_what_virtual_time_says(started: tuple[int, Path], name: str) -> None:
    run, virtual = found(started, name), told(CASES[name].run(started[0], "virtual"))
    bound = BOUNDS.get(name, ROUNDING)
    assert_same(run["state"], virtual["state"], bound)
    for count in COUNTS:
        assert run["summary"][count] == virtual["summary"][count], count
    assert len(run["history"]) == len(virtual["history"])
    for mine, theirs in zip(run["history"], virtual["history"], strict=True):
        # That a loop has ended is known a round later than in virtual time.
        for field in mine.keys() - {"time_s", "threshold" if "loop" in CASES[name].settings else ""}:
            near = theirs[field]
            near = near if near is None else pytest.approx(near, rel=bound, abs=bound)
            assert mine[field] == near, (field, mine, theirs)


def test_something_was_skipped(started: tuple[int, Path]) -> None:
    """Else the cases of it would say nothing."""
    for name in ("skipped", "skipped and accumulated"):
        assert found(started, name)["summary"]["nonfinite"] > 0


@pytest.mark.parametrize("name", [*ONE_PROCESS, *ACCUMULATED, *LIKE_VIRTUAL, *LOCAL_STEPS][::3])
def test_alone_in_one_process(name: str) -> None:
    case = CASES[name]
    run, virtual = told(case.run(1, "distributed")), told(case.run(1, "virtual"))
    assert_same(run["state"], virtual["state"], BOUNDS.get(name, ROUNDING))
    for count in COUNTS:
        assert run["summary"][count] == virtual["summary"][count], count
