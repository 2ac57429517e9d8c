"""Buckets: how Δ is cut, and that all ranks begin the same ones in the same order, as early as they can."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline import PacelineError, Strategy
from paceline.engine.base import Budget, Job
from paceline.engine.distributed.gradient_buckets import Bucket, cut, cut_apart
from paceline.engine.distributed.overlap import Overlap, pays
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.spmd.communicator import Traffic
from paceline.engine.spmd.launch_env import LaunchEnv
from paceline.replica.flat_state import FlatLayout
from tests.engine import programs


def layout(sizes: list[int], doubles: list[int]) -> FlatLayout:
    module = nn.Module()
    for place, size in enumerate(sizes):
        module.register_parameter(f"single{place}", nn.Parameter(torch.zeros(size)))
    for place, size in enumerate(doubles):
        module.register_parameter(f"double{place}", nn.Parameter(torch.zeros(size, dtype=torch.float64)))
    return FlatLayout.of(module)


SIZES = st.lists(st.integers(1, 40), max_size=6)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), SIZES, st.integers(1, 300), st.integers(1, 300))
def test_buckets_are_all_of_a_once_from_its_end(sizes: list[int], doubles: list[int], least: int, first: int) -> None:
    of = layout(sizes, doubles)
    found = cut(of, least, first)
    assert sorted(m for bucket in found for m in bucket.members) == list(range(len(sizes) + len(doubles)))
    for number, block in enumerate(of.parameters):
        mine = [bucket for bucket in found if bucket.vector == number]
        assert (mine[0].stop, mine[-1].start) == (block.elements, 0)
        assert all(one.start == other.stop for one, other in pairwise(mine))
        for place, bucket in enumerate(mine[:-1]):
            bound = min(first if place == 0 else least, of.parameter_bytes)
            assert (bucket.stop - bucket.start) * block.dtype.itemsize >= bound
    if of.parameter_bytes <= least:
        assert len(found) == len(of.parameters)


def test_vectors_take_turns() -> None:
    order = [(bucket.vector, bucket.start) for bucket in cut(layout([8, 8], [4, 4]), 32, 32)]
    assert order == [(0, 8), (1, 4), (0, 0), (1, 0)]


class Wire:
    """Traffic of one rank that is alone with itself: what is begun is kept, and doubled when it is waited for."""

    ranks = 2

    def __init__(self, *, elsewhere: bool = False) -> None:
        self.traffic = Traffic()
        self.elsewhere, self.begun, self.waited = elsewhere, list[Tensor](), list[str]()

    def to_device(self, vector: Tensor) -> Tensor:
        return vector.clone() if self.elsewhere else vector

    def start_all_reduce(self, vector: Tensor, out: Tensor | None = None) -> Tensor:
        self.begun.append(vector.clone())
        return vector if out is None else out.copy_(vector)

    def wait(self, work: Tensor, what: str) -> None:
        work.mul_(2.0)
        self.waited.append(what)


def bucketed(**words: Any) -> tuple[Overlap, Wire, ReduceBuffer]:
    """Three buckets: of parameters 3 and 2, of 1, and of 0."""
    of = layout([2, 3, 1, 2], [])
    cuts = cut(of, 8, 12)
    assert [bucket.members for bucket in cuts] == [(3, 2), (1,), (0,)]
    wire, buffer = Wire(**words), ReduceBuffer(of, 2)
    return Overlap(cuts, buffer, wire), wire, buffer  # type: ignore[arg-type]


def gradient(index: int) -> Tensor:
    return torch.full(([2, 3, 1, 2][index],), float(index + 1))


def test_a_bucket_is_begun_once_it_and_those_before_it_are_full() -> None:
    overlap, wire, _ = bucketed()
    begun = []
    for index in (1, 3, 2, 0):
        overlap.add(index, gradient(index), 0.5)
        begun.append(len(wire.begun))
    assert begun == [0, 0, 2, 3]
    assert [part.tolist() for part in wire.begun] == [[1.5, 2.0, 2.0], [1.0, 1.0, 1.0], [0.5, 0.5]]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_sums_are_in_the_buffer(elsewhere: bool) -> None:
    overlap, wire, buffer = bucketed(elsewhere=elsewhere)
    for _ in range(2):  # nothing of the Δ before is left
        for index in (3, 2, 1, 0):
            overlap.add(index, gradient(index), 0.5)
        overlap.flush()
        overlap.wait("a test")
        assert buffer.state.parameters[0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 4.0]
    assert wire.waited == ["a test"] * 6
    assert wire.traffic.sent_bytes == 2 * 8 * 4  # two rings of two ranks: each sends a vector's bytes once


def test_large_parameters_are_a_bucket_of_their_own() -> None:
    of = layout([2, 9, 1, 2, 8], [1, 4])
    found = [(bucket.vector, bucket.start, bucket.stop, bucket.members) for bucket in cut_apart(of, 32)]
    singles = [(0, 14, 22, (4,)), (0, 11, 14, (3, 2)), (0, 2, 11, (1,)), (0, 0, 2, (0,))]
    assert found == [*singles, (1, 1, 5, (6,)), (1, 0, 1, (5,))]
    assert cut_apart(layout([3, 2], []), 32) == (Bucket(0, 0, 5, (1, 0)),)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_they_are_summed_from_where_they_are(weight: float) -> None:
    of = layout([2, 3, 1, 2], [])
    wire, buffer = Wire(), ReduceBuffer(of, 2)
    overlap = Overlap(cut_apart(of, 12), buffer, wire, early=False)  # type: ignore[arg-type]
    buffer.state.parameters[0].fill_(7.0)
    for index in range(4):
        overlap.add(index, gradient(index), weight)
    large = buffer.state.views.parameters[1]
    expected = gradient(1) * weight
    assert large.tolist() == expected.tolist()
    overlap.wait("a test")
    assert buffer.state.parameters[0].tolist() == [2 * weight * each for each in (1, 1, 2, 2, 2, 3, 4, 4)]
    overlap.flush()  # without a Δ
    assert [part.tolist() for part in wire.begun[-3:]] == [[0.0] * 3, [0.0] * 3, [0.0] * 2]


def test_who_has_no_delta_brings_zeros_in_the_same_order() -> None:
    overlap, wire, buffer = bucketed()
    buffer.state.parameters[0].fill_(7.0)
    overlap.flush()
    assert [part.tolist() for part in wire.begun] == [[0.0] * 3, [0.0] * 3, [0.0] * 2]


def test_half_a_delta_is_refused() -> None:
    overlap, *_ = bucketed()
    overlap.add(3, gradient(3), 1.0)
    with pytest.raises(PacelineError, match="in part was begun anew"):
        overlap.add(3, gradient(3), 1.0)
    with pytest.raises(PacelineError, match="in part was left"):
        overlap.flush()


@pytest.mark.parametrize(
    ("cores", "backend", "here", "expected"),
    [(2, "gloo", 2, False), (3, "gloo", 2, False), (4, "gloo", 2, True), (2, "gloo", 1, True), (1, "nccl", 2, True)],
)
def test_on_one_host_gloo_wants_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, backend: str, here: int, expected: bool
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    job = Job(programs.program(), Strategy.parse("replicas=2 threads=1"), Budget("steps", 1, 1))
    assert pays(job, LaunchEnv(rank=0, size=2, local_size=here), backend) == expected
