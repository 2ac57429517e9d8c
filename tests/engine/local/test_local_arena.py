"""Where versions of A lie: never where somebody reads, and there is always room for one more."""

import os
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.local.arena import ArenaLayout, ParameterArena, VersionPool
from paceline.engine.local.control_block import ControlBlock
from paceline.replica.flat_state import FlatLayout
from tests.engine import programs


def store(replicas: int = 3, slots: int = 1, vectors: int = 1) -> ParameterArena:
    return ParameterArena(ArenaLayout(FlatLayout.of(programs.batchnorm()), replicas, slots, vectors, workers=replicas))


@given(replicas=st.integers(1, 5), moves=st.lists(st.integers(0, 11), max_size=60))
def test_nobody_reads_what_is_written(replicas: int, moves: list[int]) -> None:
    """Any order of reads, ends of reads and updates."""
    lying = store(replicas)
    places, reads = VersionPool(lying), dict[int, int]()
    for move in moves:
        replica = move % replicas
        if move % 3 == 0:
            there = places.free()
            assert there not in {places.current, *reads.values()}
            places.commit_write(there)
            assert places.current == there
        elif replica in reads:
            places.release(replica)
            del reads[replica]
        else:
            reads[replica] = places.acquire(replica)
            assert reads[replica] == places.current
    lying.close()


def test_lockstep_needs_two_places() -> None:
    lying = store(replicas=5)
    places, seen = VersionPool(lying), set[int]()
    for _ in range(6):
        for replica in range(5):
            seen.add(places.acquire(replica))
        for replica in range(5):
            places.release(replica)
        places.commit_write(places.free())
    assert seen == {0, 1}
    lying.close()


def test_who_is_lost_twice_is_counted_once() -> None:
    lying = store()
    places = VersionPool(lying)
    place = places.acquire(0)
    places.acquire(1)
    places.commit_write(places.free())
    places.release(0)
    places.release(0)
    assert places.free() != place  # replica 1 still reads it
    lying.close()


def test_versions_are_read_where_they_are_written_and_cannot_be_written_there() -> None:
    lying = store()
    lying.commit("version 2")
    for vector in lying.version(2).vectors:
        vector.fill_(3)
    seen = lying.readonly_version(2)
    assert all(bool((vector == 3).all()) for vector in seen.vectors)
    assert {v.data_ptr() for v in seen.vectors}.isdisjoint(v.data_ptr() for v in lying.version(2).vectors)
    assert lying._readable is not None
    with lying._readable.buffer as pages:
        assert pages.readonly  # what torch, which knows no such tensors, would write is a SIGSEGV
    lying.close()


def test_every_process_lays_out_alike() -> None:
    here = store(replicas=2, slots=3, vectors=2)
    there = ParameterArena(here.layout, os.dup(here.segment.fd))
    marks: list[tuple[Any, Any]] = [
        (here.delta(1, 2).parameters, there.delta(1, 2).parameters),
        (here.sums, there.sums),
        (here.memory[1][0], there.memory[1][0]),
        (here.version(3).buffers, there.version(3).buffers),
    ]
    here.commit("delta 1 2", "sum", "memory 1 0", "memory 1 1", "version 3")
    for k, (mine, theirs) in enumerate(marks):
        for vector in mine:
            vector.fill_(k + 1)
        assert all(bool((vector == k + 1).all()) for vector in theirs)
    assert all(bool((v == 1).all()) for v in there.delta(1, 2).parameters)  # nothing lies on anything else
    assert torch.equal(there.sums[0], torch.full_like(there.sums[0], 2))
    here.close()
    there.close()


def test_replicas_that_write_in_place_have_one_version_and_nothing_else() -> None:
    lying = store(replicas=4, slots=0, vectors=0)
    size = lying.layout.state.nbytes + 8 * ControlBlock.size(4, 0, 4)
    assert lying.layout.versions == 1
    assert size <= lying.segment.size_bytes <= size + 1024
    lying.close()
