"""Compressed all-reduces on 1, 2 and 3 ranks over Gloo: sums, what is lost, what is kept, what is sent.

A group is started once for the whole file; ``compression_entries.py`` has the scenes that its ranks go through.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comm_entries import Pipe
from compression_entries import DTYPES, ELEMENTS, FEEDBACK, SHAPES, TEXTS
from torch import Tensor

from paceline.comm.fork_server import ForkServer
from paceline.compression import parse
from paceline.compression.powersgd import PowerSgd
from tests.formulas import ring_payload_bytes

WORLDS = (1, 2, 3)
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
"""The relative error of one rounding."""

Ranks = list[dict[str, Any]]


class Worlds(dict[int, Ranks]):
    """What each rank of each group saw; a group starts when it is asked for."""

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        super().__init__()
        self._fork_server, self._folder, self.pipe = fork_server, folder, Pipe()

    def __missing__(self, ranks: int) -> Ranks:
        folder = self._folder / str(ranks)
        folder.mkdir()
        for rank in range(ranks):
            args = {"rank": rank, "ranks": ranks, "folder": str(folder)}
            self._fork_server.spawn("compression_entries:rank", args, [self.pipe.fd])
        for _ in range(ranks):
            self.pipe.read()
        self[ranks] = [read(folder, rank) for rank in range(ranks)]
        return self[ranks]


@pytest.fixture(scope="module")
def worlds(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """All groups."""
    made = Worlds(fork_server, tmp_path_factory.mktemp("worlds"))
    yield made
    os.close(made.pipe.end)
    os.close(made.pipe.fd)


def read(folder: Path, rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = torch.load(folder / f"{rank}.pt", weights_only=False)
    return seen


@pytest.fixture(params=WORLDS, ids="P={}".format)
def ranks(request: pytest.FixtureRequest, worlds: Worlds) -> Ranks:
    """The same test for every group."""
    return worlds[request.param]


def shares(ranks: Ranks, scene: str, key: str, step: int = 0) -> Tensor:
    """All ranks' gradients, in float64, one row each."""
    return torch.stack([rank[scene][key]["steps"][step]["share"].double() for rank in ranks])


def total(ranks: Ranks, scene: str, key: str, step: int = 0) -> Tensor:
    """The sum that rank 0 was given."""
    summed: Tensor = ranks[0][scene][key]["steps"][step]["sum"]
    return summed


KEYS = [f"{text} {dtype}" for text in TEXTS for dtype in DTYPES]


# ---------------------------------------------------------------------------------------------------------- every one


@pytest.mark.parametrize("key", KEYS)
def test_every_rank_has_the_same_bits(ranks: Ranks, key: str) -> None:
    for step in range(4):
        sums = [rank["ordinary"][key]["steps"][step]["sum"] for rank in ranks]
        assert all(torch.equal(other.view(torch.uint8), sums[0].view(torch.uint8)) for other in sums)
        assert sums[0].abs().max() > 0


@pytest.mark.parametrize("text", TEXTS)
def test_a_pickled_state_goes_on_as_if_nothing_had_been(ranks: Ranks, text: str) -> None:
    for rank in ranks:
        straight, resumed = rank["ordinary"][f"{text} float64"]["steps"], rank["resumed"][text]["steps"]
        assert all(torch.equal(a["sum"], b["sum"]) for a, b in zip(straight, resumed, strict=True))


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_comes_of_nothing(ranks: Ranks, text: str) -> None:
    for rank in ranks:
        assert all(torch.equal(step["sum"], torch.zeros(ELEMENTS)) for step in rank["zeros"][text]["steps"])


@pytest.mark.parametrize("bad", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_not_finite_is_so_on_every_rank_and_leaves_nothing_behind(ranks: Ranks, text: str, bad: str) -> None:
    for rank in ranks:
        before, spoiled, after = rank["spoiled"][f"{text} {bad}"]["steps"]
        assert not torch.isfinite(spoiled["sum"]).all()
        assert torch.equal(spoiled["residual"], before["residual"])
        assert torch.isfinite(after["sum"]).all()


# -------------------------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("text", ["none", "fp16", "bf16", "top-k:ratio=1"])
def test_sums_that_need_no_rounding_are_exact(ranks: Ranks, text: str) -> None:
    assert torch.equal(total(ranks, "whole_numbers", text), shares(ranks, "whole_numbers", text).sum(0))


def test_powersgd_leaves_what_it_does_not_compress_exact(ranks: Ranks) -> None:
    exact, start = shares(ranks, "whole_numbers", "powersgd").sum(0), 0
    small = {(20,), (3, 3), (), (40, 1)}
    for shape in SHAPES:
        span = slice(start, start := start + math.prod(shape))
        if shape in small:
            assert torch.equal(total(ranks, "whole_numbers", "powersgd")[span], exact[span])


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("text", "unit"), [("none", 0.0), ("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_sums_are_off_by_the_roundings_on_the_way(ranks: Ranks, text: str, unit: float, dtype: str, step: int) -> None:
    """One rounding of each share and P-1 of the sum, in 16 bits and in the gradient's own."""
    given = shares(ranks, "ordinary", f"{text} {dtype}", step)
    error = (total(ranks, "ordinary", f"{text} {dtype}", step).double() - given.sum(0)).abs()
    bound = ((1 + unit) ** len(ranks) - 1 + len(ranks) * UNIT[dtype]) * given.abs().sum(0)
    assert (error <= bound + smallest_loss(text, given)).all()


@pytest.mark.parametrize("size", ["1e-42", "1e-30", "1e-06", "1000000.0", "1e+30", "1e+38"])
def test_fp16_has_no_range_of_its_own(ranks: Ranks, size: str) -> None:
    given = shares(ranks, "magnitudes", size)
    error = (total(ranks, "magnitudes", size).double() - given.sum(0)).abs()
    # 2^-149 is float32's own last step: it is all that 1e-42 has left.
    bound = ((1 + 2.0**-11) ** len(ranks) - 1) * given.abs().sum(0) + smallest_loss("fp16", given) + 2.0**-149
    assert (error <= bound).all()
    assert total(ranks, "magnitudes", size).abs().max() > 0


def smallest_loss(text: str, given: Tensor) -> float:
    """What float16 loses below its smallest step, as ``fp16.py`` says."""
    return 2.0**-38 * len(given) ** 2 * float(given.abs().max()) if text == "fp16" else 0.0


@pytest.mark.parametrize("rank", [2, 3])
def test_powersgd_is_exact_where_the_sum_has_no_higher_rank(ranks: Ranks, rank: int) -> None:
    seen = ranks[0]["low_rank"][f"{rank}"]
    # Two products of 18 and 24 terms of size 1 to 5, and an orthonormalisation, at 1e-16 each.
    torch.testing.assert_close(seen["sum"], seen["expected"], rtol=0, atol=1e-13)
    lost = sum(r["low_rank"][f"{rank}"]["residual"] for r in ranks)
    torch.testing.assert_close(lost, torch.zeros_like(lost), rtol=0, atol=1e-13)


def test_powersgd_of_too_low_a_rank_is_not(ranks: Ranks) -> None:
    seen = ranks[0]["low_rank"]["1"]
    assert (seen["sum"] - seen["expected"]).abs().max() > 0.1


# ---------------------------------------------------------------------------------------------------- error feedback


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", FEEDBACK)
def test_what_was_applied_and_what_is_left_make_up_all_gradients(ranks: Ranks, text: str, dtype: str) -> None:
    key = f"{text} {dtype}"
    given = sum(shares(ranks, "ordinary", key, step).sum(0) for step in range(4))
    applied = sum(total(ranks, "ordinary", key, step).double() for step in range(4))
    left = sum(rank["ordinary"][key]["steps"][-1]["residual"].double() for rank in ranks)
    # An element of a product sums some 40 terms as large as the largest element of its matrix, 100, in each of 4 steps.
    bound = 40 * 4 * 100 * len(ranks) * UNIT[dtype]
    torch.testing.assert_close(applied + left, given, rtol=0, atol=bound)


@pytest.mark.parametrize("text", [text for text in FEEDBACK if text != "top-k:ratio=1"])
def test_something_is_left(ranks: Ranks, text: str) -> None:
    assert all(rank["ordinary"][f"{text} float64"]["steps"][-1]["residual"].abs().max() > 1e-3 for rank in ranks)


@pytest.mark.parametrize("scene", ["sparse_descent", "low_rank_descent"])
@pytest.mark.parametrize("size", [2, 3], ids="P={}".format)
def test_descent_reaches_the_optimum_with_feedback_and_not_without(worlds: Worlds, size: int, scene: str) -> None:
    seen = worlds[size][0][scene]
    far, near = ((seen[how] - seen["optimum"]).norm() / seen["optimum"].norm() for how in ("forgotten", "kept"))
    # The step size has come down to a sixteenth by then, and with it what is still to be sent of the ±20.
    assert near < 0.1
    assert far > 0.5


# ------------------------------------------------------------------------------------------------------------ payload


def sent(ranks: Ranks, key: str) -> int:
    every = {step["sent"] for rank in ranks for step in rank["ordinary"][key]["steps"]}
    assert len(every) == 1
    return every.pop()


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float64", 8)])
def test_payload_is_the_rings(ranks: Ranks, dtype: str, width: int) -> None:
    full = ring_payload_bytes(ELEMENTS, len(ranks), width)
    one = ring_payload_bytes(1, len(ranks), width)
    assert sent(ranks, f"none {dtype}") == full
    assert sent(ranks, f"bf16 {dtype}") == ring_payload_bytes(ELEMENTS, len(ranks), 2)
    assert sent(ranks, f"fp16 {dtype}") == ring_payload_bytes(ELEMENTS, len(ranks), 2) + one
    assert abs(sent(ranks, f"bf16 {dtype}") * width - 2 * full) < width  # both are rounded up


def test_payload_of_powersgd_is_that_of_its_factors(ranks: Ranks) -> None:
    small = 20 + 9 + 1 + 40
    first = ring_payload_bytes(small + 12 + 16, len(ranks), 4)  # the rows of both matrices, and what is not compressed
    second = ring_payload_bytes(20 + 36, len(ranks), 4)
    assert sent(ranks, "powersgd:rank=1 float32") == first + second


@pytest.mark.parametrize(("ratio", "kept"), [(0.25, 222), (1, ELEMENTS)])
def test_payload_of_top_k_is_indices_and_values_to_all_others(ranks: Ranks, ratio: float, kept: int) -> None:
    assert sent(ranks, f"top-k:ratio={ratio} float32") == (len(ranks) - 1) * kept * (4 + 4)
    assert sent(ranks, f"top-k:ratio={ratio} float64") == (len(ranks) - 1) * kept * (4 + 8)


def test_payload_of_blocks_is_the_ring_of_those_that_are_sent(ranks: Ranks) -> None:
    """886 elements are 18 blocks of 50, the last of 36; half of them are sent, and one number beside them."""
    assert sent(ranks, "blocks:ratio=0.5,size=50 float64") == ring_payload_bytes(9 * 50 + 1, len(ranks), 8)


def test_blocks_that_moved_most_are_sent_most() -> None:
    """The last block's gradient is a thousand times the others', so nearly every second one drawn of two is that."""
    compression = parse("blocks:ratio=0.2,size=10")
    state, seen = compression.start([(100,)], torch.float64), torch.zeros(10)
    for step in range(200):
        gradient = torch.full((100,), 1e-3, dtype=torch.float64)
        gradient[90:] = 1.0
        message = compression.encode(state, gradient)
        chosen = message[:16].clone().view(torch.int64)
        assert len(set(chosen.tolist())) == 2
        seen[chosen] += step >= 10
    assert seen[9] > 180
    assert seen[:9].min() >= 1, "each is drawn now and then"


# -------------------------------------------------------------------------------------------------------------- state


def test_only_what_shrinks_to_half_is_compressed() -> None:
    compression = parse("powersgd:rank=4")
    assert isinstance(compression, PowerSgd)
    state = compression.start([(16, 16), (15, 16), (16, 4, 2, 2), (64,)], torch.float32)
    assert [(p.start, p.rows, p.columns) for p in state.matrices] == [(0, 16, 16), (496, 16, 16)]
    assert [(p.start, p.rows, p.columns) for p in state.rest] == [(256, 15, 16), (752, 1, 64)]
