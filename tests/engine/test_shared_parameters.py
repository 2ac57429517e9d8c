"""Ranks of one host that share the memory of A compute what those compute that have it each."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.fork_server import ForkServer
from paceline.engine.distributed import gradient_buckets
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.distributed.zero1 import HeldGradients
from paceline.engine.distributed.zero_partition import SharedPartition
from paceline.replica.flat_state import DtypeBuffer, FlatLayout
from tests.engine.distributed_cases import kept
from tests.ranks import Play, spawned, statuses

RANKS = 2
"""Two numbers have one sum, in whatever order they are added."""

DIVIDED = "shard_optimizer=true"

NAMES = (
    "momentum",
    "adam",
    "clipping",
    "lamb",
    "tied",
    "frozen",
    "two dtypes",
    "accumulated",
    "running means",
    "until",
)

ROUNDED = {"clipping": ("gathered", "shared", "held"), "lamb": ("gathered", "shared"), "accumulated": ("gathered",)}
"""A norm is summed by slices, or a sum is weighted before the step and not in it: some roundings of 2e-16, 13 steps."""

SCRIPT = Path(__file__).with_name("shared_parameters_script.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, play: Play) -> Path:
    path: Path = tmp_path_factory.mktemp("ranks")
    play(SCRIPT, "all", size=RANKS, folder=path)
    return path


def states(folder: Path, name: str) -> list[dict[str, torch.Tensor]]:
    return [each["state"] for each in kept(folder, name, RANKS)]


@pytest.mark.parametrize("how", ["gathered", "shared", "held"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_whole_optimizer(folder: Path, name: str, how: str) -> None:
    bound = 1e-12 if how in ROUNDED.get(name, ()) else 0.0
    expected = states(folder, f"{name}, whole")[0]
    for state in states(folder, f"{name}, {how}"):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=bound, atol=bound)
    notes = kept(folder, f"{name}, {how}", RANKS)[0]["summary"]["notes"]
    assert notes["shard_optimizer"] is True
    assert notes["shared_parameters"] is (how != "gathered")
    assert (notes["buckets"] > 1) is (how == "held" and name != "lamb")


def test_it_sends_no_a(folder: Path) -> None:
    """Half of what is sent where A is gathered: two ranks give half of Δ each, and need half of A."""
    sent = [
        kept(folder, f"momentum, {how}", RANKS)[0]["summary"]["payload_bytes_per_step"]
        for how in ("gathered", "shared")
    ]
    size = kept(folder, "momentum, shared", RANKS)[0]["summary"]["parameter_bytes"][0]
    assert sent[0] - sent[1] == pytest.approx(size, abs=64 * RANKS)  # what is left over, and cache lines


def test_a_replica_reads_what_it_can_not_write(folder: Path) -> None:
    for shared, own in kept(folder, "mappings", RANKS):
        assert "r--s" in shared
        assert "paceline:parameters" in shared
        assert "paceline" not in own


@pytest.mark.parametrize("short", range(RANKS))
def test_where_the_memory_can_not_be_had_a_is_gathered(folder: Path, short: int) -> None:
    expected = states(folder, "momentum, whole")[0]
    assert kept(folder, f"without memory on {short}", RANKS)[0]["summary"]["notes"]["shared_parameters"] is False
    for state in states(folder, f"without memory on {short}"):
        assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert not any("paceline" in line for line in kept(folder, f"mapping without memory on {short}", RANKS))


def test_a_model_of_the_users_is_theirs_again(folder: Path) -> None:
    """It may be written after the run, and is while records are made: by one rank, which changes nothing elsewhere."""
    expected = states(folder, "momentum, whole")[0]
    for name in ("own model", "own model, watched"):
        for state, doubled in zip(states(folder, name), kept(folder, f"{name}, doubled", RANKS), strict=True):
            assert all(torch.equal(state[key], value) for key, value in expected.items())
            assert all(torch.equal(doubled[key], 2 * value) for key, value in expected.items())


def test_who_writes_it_is_killed_and_the_other_told(tmp_path: Path, session_fork_server: ForkServer) -> None:
    children = spawned(session_fork_server, SCRIPT, "written", size=RANKS, folder=tmp_path)
    told: list[Any] = statuses(session_fork_server, children)
    assert "SIGSEGV" in told[1]
    assert told[0] == "exit code 1"


def test_gradients_that_no_update_has_taken_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "APART_BYTES", 1)
    module = nn.Linear(3, 2)
    held = HeldGradients(ReduceBuffer(FlatLayout.of(module), RANKS))
    for value in (1.0, 2.0):  # the first Δ comes too late, say
        gradients = [torch.full_like(parameter, value) for parameter in module.parameters()]
        for index, gradient in enumerate(gradients):
            held.add(index, gradient, 1.0)
        held.flush()
        held.wait("")
    taken = held.take()
    assert [given is not None and given.unique().tolist() for given in taken] == [[2.0], [2.0]]
    assert held.take() == []


@pytest.mark.parametrize("elements", [1, 15, 16, 1000])
def test_slices_cut_anywhere_share_no_cache_line(elements: int) -> None:
    block = FlatLayout.of(nn.Linear(elements, 1, bias=False)).parameters[0]
    a, delta = torch.zeros(elements), torch.zeros(elements)
    parts = [SharedPartition.of(block, a, delta, slice(0, elements), r, 3, anywhere=True).own for r in range(3)]
    assert parts[0].start == 0
    assert all(one.start + len(one.state) == other.start for one, other in pairwise(parts))
    assert sum(len(part.state) for part in parts) == elements
    assert all(part.start % 16 == 0 for part in parts if len(part.state))
    assert [part.block.elements for part in parts] == [len(part.state) for part in parts]


def test_or_are_whole_parameters_of_a_part_of_the_vector() -> None:
    block: DtypeBuffer = FlatLayout.of(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))).parameters[0]
    a, delta = torch.zeros(20), torch.arange(20.0)
    parts = [SharedPartition.of(block, a, delta, slice(9, 20), rank, 2, anywhere=False).own for rank in range(2)]
    assert [[entry.name for entry in part.block.entries] for part in parts] == [["0.bias"], ["1.weight", "1.bias"]]
    assert [part.start for part in parts] == [9, 12]
    assert parts[1].delta[parts[1].block.entries[1].start :].tolist() == [18.0, 19.0]
