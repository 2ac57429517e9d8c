"""Hosts that are cut off from each other: at most one side goes on, and the other waits, or says why it ends."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.comm.fork_server import ForkServer
from tests import ranks
from tests.engine.local.commands import eventually
from tests.namespaces import Host, cut_off, two_hosts

SCRIPT = Path(__file__).with_name("distributed_partition_script.py")
PORT = 29401
"""Nobody else is in the first host's namespace."""

SUSPECT_AFTER_S = 3.0


@dataclass
class Ranks:
    """Of a run over two hosts, the first of which keeps the store."""

    folder: Path
    sides: tuple[range, range]

    def updates(self, rank: int) -> dict[int, tuple[float, str]]:
        """Version -> when this rank made it, and the digest of its parameters."""
        path = self.folder / f"log.{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = (line.split() for line in lines if line.count(" ") == 2)
        return {int(version): (float(at), digest) for version, at, digest in rows}

    @property
    def ranks(self) -> range:
        return range(self.sides[1].stop)

    def newest(self, rank: int) -> int:
        return max(self.updates(rank), default=0)

    def ended(self, rank: int) -> bool:
        return (self.folder / f"ended.{rank}").exists()

    def said(self, rank: int) -> str:
        return (self.folder / f"ended.{rank}").read_text()

    def all_ended(self, side: range) -> bool:
        return all(self.ended(rank) for rank in side)


@contextlib.contextmanager
def started(
    fork_server: ForkServer, hosts: tuple[Host, Host], sizes: tuple[int, int], folder: Path, timeout_s: float = 60.0
) -> Iterator[Ranks]:
    places = [hosts[0]] * sizes[0] + [hosts[1]] * sizes[1]
    words = str(SUSPECT_AFTER_S), str(timeout_s)
    children = ranks.spawned_on(fork_server, places, SCRIPT, *words, port=PORT, folder=folder)
    try:
        run = Ranks(folder, (range(sizes[0]), range(sizes[0], sum(sizes))))
        eventually(lambda: all(run.newest(rank) >= 5 for rank in run.ranks))
        yield run
    finally:
        for child in children:
            fork_server.forget(child)


@pytest.mark.parametrize("ways", [(True, True), (False, True), (True, False)], ids=["both", "there", "back"])
def test_the_majority_goes_on(fork_server: ForkServer, tmp_path: Path, ways: tuple[bool, bool]) -> None:
    with two_hosts() as hosts, started(fork_server, hosts, (3, 1), tmp_path) as run:
        majority, cut_at = run.sides[0], time.monotonic()
        with cut_off(hosts, ways):
            reached = max(run.newest(rank) for rank in majority)
            eventually(lambda: all(run.newest(rank) >= reached + 5 for rank in majority))
            check_one_history(run, [run.sides[1]], cut_at)
        reached = max(run.newest(rank) for rank in majority)
        eventually(lambda: run.newest(3) > reached)  # it joins again
        (tmp_path / "enough").touch()
        eventually(lambda: run.all_ended(run.ranks))
        assert {run.said(rank) for rank in run.ranks} == {"ended well 3"}
        assert "the others go on without it" in (tmp_path / "said.3").read_text()
        check_one_history(run, [], cut_at)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)], ids=["2/2", "1/3 without the store"])
def test_where_no_side_may_go_on_all_wait_for_each_other(
    fork_server: ForkServer, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    with two_hosts() as hosts, started(fork_server, hosts, sizes, tmp_path) as run:
        cut_at = time.monotonic()
        with cut_off(hosts):
            eventually(lambda: "no majority without them" in (tmp_path / "said.0").read_text())
            check_one_history(run, [*run.sides], cut_at)
        reached = max(run.newest(rank) for rank in run.ranks)
        eventually(lambda: all(run.newest(rank) >= reached + 5 for rank in run.ranks))
        (tmp_path / "enough").touch()
        eventually(lambda: run.all_ended(run.ranks))
        assert {run.said(rank) for rank in run.ranks} == {"ended well "}
        check_one_history(run, [], cut_at)


def test_they_wait_no_longer_than_the_timeout(fork_server: ForkServer, tmp_path: Path) -> None:
    with two_hosts() as hosts, started(fork_server, hosts, (2, 2), tmp_path, timeout_s=12.0) as run:
        cut_at = time.monotonic()
        with cut_off(hosts):
            eventually(lambda: run.all_ended(run.sides[1]))
            eventually(lambda: run.all_ended(run.sides[0]))
        for rank in run.sides[1]:
            assert "the job's store, which rank 0 or torchrun keeps, is gone or cut off" in run.said(rank)
        check_one_history(run, [*run.sides], cut_at)


def check_one_history(run: Ranks, stopping: list[range], cut_at: float) -> None:
    """No version has two contents, but for the one round that was under way as the cable was cut."""
    contents: dict[int, set[str]] = defaultdict(set)
    for rank in (rank for side in run.sides for rank in side):
        for version, (_, digest) in run.updates(rank).items():
            contents[version].add(digest)
    split = [version for version, digests in contents.items() if len(digests) > 1]
    assert len(split) <= 1
    for rank in (rank for side in stopping for rank in side):
        assert sum(at > cut_at + 1 for at, _ in run.updates(rank).values()) <= 1
