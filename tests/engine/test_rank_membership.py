"""Who goes on: ranks as threads that propose themselves in one store, at the moments that a test gives them."""

import threading
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from paceline.core.errors import WorkerError
from paceline.engine.spmd import membership
from paceline.engine.spmd.bounded_store import BoundedStore
from paceline.engine.spmd.membership import ExcludedError, Generation, MinorityError, RankMembership, Survives


class Cluster:
    """Ranks of one run, in threads."""

    def __init__(self, ranks: int, *, timeout_s: float = 60.0, dead: Collection[int] = ()) -> None:
        self.store, self.said, self.found = HashStore(), list[str](), dict[int, Generation | WorkerError]()
        self.threads, self.waits = dict[int, threading.Thread](), threading.Event()
        peers, exits = [f"rank {rank}" for rank in range(ranks)], dict.fromkeys(dead, "killed by SIGKILL")
        survives = Survives(0.1, timeout_s, self._say)
        self.members = []
        for rank in range(ranks):
            registry: Any = SimpleNamespace(own=peers[rank], peers=peers, exited=lambda _: dict(exits))
            self.members.append(RankMembership(BoundedStore(self.store, 60.0), registry, rank, survives))

    def agree(self, ranks: Sequence[int]) -> None:
        """Have these propose themselves, now."""

        def run(rank: int) -> None:
            try:
                self.found[rank] = self.members[rank].agree(7)
            except WorkerError as error:
                self.found[rank] = error

        for rank in ranks:
            self.threads[rank] = threading.Thread(target=run, args=(rank,))
            self.threads[rank].start()

    def ended(self, ranks: Sequence[int]) -> list[Any]:
        """Wait for these, and return the members that each has found, or the error."""
        for rank in ranks:
            self.threads[rank].join(60.0)
        found = [self.found[rank] for rank in ranks]
        return [each.members if isinstance(each, Generation) else each for each in found]

    def _say(self, sentence: str) -> None:
        self.said.append(sentence)
        self.waits.set()


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "PROPOSAL_S", 0.1)


def test_a_majority_goes_on_and_one_that_comes_later_is_told() -> None:
    cluster = Cluster(3)
    cluster.agree([0, 1])
    assert cluster.ended([0, 1]) == [(0, 1)] * 2
    cluster.agree([2])
    (late,) = cluster.ended([2])
    assert isinstance(late, ExcludedError)
    assert cluster.said == []


def test_all_that_are_left_go_on_where_the_others_are_known_to_be_dead() -> None:
    cluster = Cluster(4, dead=[0, 1, 3])
    cluster.agree([2])
    assert cluster.ended([2]) == [(2,)]


def test_half_of_them_wait_for_the_other_half(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(4)
    cluster.agree([0, 1])
    assert cluster.waits.wait(60.0)
    monkeypatch.setattr(membership, "PROPOSAL_S", 60.0)  # with one that is back they are a majority
    cluster.agree([2, 3])
    assert cluster.ended(range(4)) == [(0, 1, 2, 3)] * 4
    (said,) = cluster.said
    assert said.startswith("rank 2, rank 3 said nothing for 0.1 s; ranks [0, 1] are no majority")


def test_where_enough_are_back_they_go_on_without_the_rest() -> None:
    cluster = Cluster(5)
    cluster.agree([1, 4])
    assert cluster.waits.wait(60.0)
    cluster.agree([2])
    assert cluster.ended([1, 2, 4]) == [(1, 2, 4)] * 3


def test_they_wait_no_longer_than_the_timeout() -> None:
    cluster = Cluster(4, timeout_s=0.5)
    cluster.agree([0, 1])
    errors = cluster.ended([0, 1])
    assert all(isinstance(error, MinorityError) for error in errors)
    assert "rank 1 is among 2 of 4 ranks, and no more than half of them must not go on" in str(errors[1])
