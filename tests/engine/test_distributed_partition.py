"""Hosts that are cut off from each other: at most one side goes on, and the other says why it does not."""

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
LONGEST_STEP_S = 3.0
"""Steps of 0.02 s on a busy machine; three times as long as the longest one is silence, too."""


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

    def newest(self, rank: int) -> int:
        return max(self.updates(rank), default=0)

    def ended(self, rank: int) -> tuple[float, str] | None:
        path = self.folder / f"ended.{rank}"
        if not path.exists():
            return None
        at, said = path.read_text().split("\n", 1)
        return float(at), said

    def all_ended(self, side: range) -> bool:
        return all(self.ended(rank) is not None for rank in side)


@contextlib.contextmanager
def started(fork_server: ForkServer, hosts: tuple[Host, Host], sizes: tuple[int, int], folder: Path) -> Iterator[Ranks]:
    places = [hosts[0]] * sizes[0] + [hosts[1]] * sizes[1]
    children = ranks.spawned_on(fork_server, places, SCRIPT, str(SUSPECT_AFTER_S), port=PORT, folder=folder)
    try:
        yield Ranks(folder, (range(sizes[0]), range(sizes[0], sum(sizes))))
    finally:
        for child in children:
            fork_server.forget(child)


@pytest.mark.parametrize(
    ("sizes", "ways", "goes_on"),
    [
        ((3, 1), (True, True), 0),
        ((2, 2), (True, True), None),
        ((1, 3), (True, True), None),
        ((3, 1), (False, True), 0),
        ((3, 1), (True, False), 0),
    ],
    ids=["3/1", "2/2", "1/3 without the store", "one way there", "one way back"],
)
def test_at_most_one_side_goes_on(
    fork_server: ForkServer, tmp_path: Path, sizes: tuple[int, int], ways: tuple[bool, bool], goes_on: int | None
) -> None:
    with two_hosts() as hosts, started(fork_server, hosts, sizes, tmp_path) as run:
        eventually(lambda: all(run.newest(rank) >= 5 for side in run.sides for rank in side))
        cut_at = time.monotonic()
        with cut_off(hosts, ways):
            stopping = [side for number, side in enumerate(run.sides) if number != goes_on]
            eventually(lambda: all(run.all_ended(side) for side in stopping))
            eventually(lambda: time.monotonic() > cut_at + 10)  # a cut that long is healed in the scorecard, too
        if goes_on is not None:
            side = run.sides[goes_on]
            reached = max(run.newest(rank) for rank in side)
            eventually(lambda: all(run.newest(rank) >= reached + 5 for rank in side))
            (tmp_path / "enough").touch()
            eventually(lambda: run.all_ended(side))
            gone = " ".join(map(str, run.sides[1 - goes_on]))
            assert {run.ended(rank)[1] for rank in side} == {f"ended well {gone}"}  # type: ignore[index]
        check_stopped(run, stopping, cut_at)
        check_one_history(run, stopping, cut_at)


def check_stopped(run: Ranks, stopping: list[range], cut_at: float) -> None:
    """Each has said whom it misses, soon."""
    for rank in (rank for side in stopping for rank in side):
        at, said = run.ended(rank)  # type: ignore[misc]
        assert said.startswith(("ExcludedError: ", "WorkerError: ")), said
        assert (
            "said nothing for" in said or "the job's store, which rank 0 or torchrun keeps, is gone or cut off" in said
        )
        assert at - cut_at < SUSPECT_AFTER_S + 3 * LONGEST_STEP_S + 1


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
