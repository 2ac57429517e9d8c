"""Policies that are no collective, under torchrun: servers of A in threads of the first ranks."""

import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer
from tests import oracle, ranks
from tests.engine import programs
from tests.engine.distributed_cases import kept
from tests.engine.served_cases import AHEAD, LOCKSTEP, POLICIES, ROUNDING, STEPS, TEAMS, program
from tests.ranks import Play

SCRIPT = Path(__file__).with_name("distributed_served_script.py")


def test_in_lockstep_they_are_one_process(play: Play, tmp_path: Path) -> None:
    play(SCRIPT, "lockstep", size=2, folder=tmp_path)
    for name, (given, _, bound) in LOCKSTEP.items():
        expected = oracle.one_process(given, 2, STEPS)
        for model, updates in kept(tmp_path, name, 2):
            oracle.assert_same(model, expected, bound)
            assert updates == STEPS


def test_over_replicas_of_several_workers(play: Play, tmp_path: Path) -> None:
    play(SCRIPT, "teams", size=4, folder=tmp_path)
    expected = oracle.one_process(program(model=programs.wide, clip_norm=0.5), 2, 4)
    for more in TEAMS:
        for model, workers in kept(tmp_path, more, 4):
            oracle.assert_same(model, expected, ROUNDING)
            assert workers == 4


@pytest.mark.parametrize("size", AHEAD)
def test_one_that_pulls_ahead_computes_with_the_a_before(play: Play, tmp_path: Path, size: int) -> None:
    play(SCRIPT, "ahead", size=size, folder=tmp_path)
    expected = oracle.one_exchange_behind(program(model=programs.wide, clip_norm=0.5), STEPS)
    for form in AHEAD[size]:
        for model, staleness in kept(tmp_path, form, size):
            oracle.assert_same(model, expected, ROUNDING)
            assert staleness == {"0": 1, "1": STEPS - 1}


def test_every_policy_counts_each_delta_once(play: Play, tmp_path: Path) -> None:
    play(SCRIPT, "policies", size=3, folder=tmp_path)
    for policy in POLICIES:
        found = kept(tmp_path, policy, 3)
        for model, summary, lanes in found:
            assert summary["gradients"] == summary["applied"] + summary["discarded"]
            assert sum(summary["staleness"].values()) == summary["applied"] > 0
            assert lanes[-3:] == [0, 1, 2]
            oracle.assert_same(model, dict(found[0][0].named_parameters()), 0.0)


def test_what_is_pushed_is_compressed(play: Play, tmp_path: Path) -> None:
    play(SCRIPT, "compressed", size=2, folder=tmp_path)
    for summary in kept(tmp_path, "compressed", 2):
        assert summary["updates"] == 2 * STEPS


def test_a_run_goes_on_with_its_checkpoint(play: Play, tmp_path: Path) -> None:
    play(SCRIPT, "resumed", size=2, folder=tmp_path)
    expected = oracle.one_process(program(), 2, STEPS)
    for model in kept(tmp_path, "resumed", 2):
        oracle.assert_same(model, expected, ROUNDING)


Ends = Callable[..., list[Any]]


@pytest.fixture
def ends(fork_server: ForkServer, tmp_path: Path) -> Ends:
    """How three ranks end of which one does something; None: it was killed."""

    def run(who: int, deed: str, **options: Any) -> list[Any]:
        children = ranks.spawned(fork_server, SCRIPT, "ended", str(who), deed, repr(options), size=3, folder=tmp_path)
        if deed == "stop":
            liveness.wait_gone([child.pidfd for rank, child in enumerate(children) if rank != who], ranks.WITHIN_S)
            signal.pidfd_send_signal(children[who].pidfd, signal.SIGKILL)
        statuses = ranks.statuses(fork_server, children)
        dead = who if deed in ("die", "stop") else None
        said = "\n".join(ranks.said(tmp_path, rank).read_text() for rank in range(3))
        assert [status == ranks.WELL for status in statuses] == [rank != dead for rank in range(3)], said
        return [None if rank == dead else kept_by(tmp_path, rank) for rank in range(3)]

    return run


def kept_by(folder: Path, rank: int) -> Any:
    return pickle.loads((folder / f"ended.{rank}").read_bytes())


def test_a_rank_that_dies_takes_its_replica_alone(ends: Ends) -> None:
    first, other, dead = ends(2, "die", strategy="aggregation=asynchronous servers=2")
    assert dead is None
    assert first == other
    assert (first[0], first[2][0][0]) == ("", 2)
    assert "rank 2 (process " in first[2][0][1]


def test_or_ends_the_run_where_that_is_asked_for(ends: Ends) -> None:
    for kind, told, *_ in ends(2, "die", on_death="stop")[:2]:
        assert kind == "WorkerError"
        assert "replica 2 died: rank 2 (process" in told


@pytest.mark.parametrize("who", [0, 1])
def test_the_death_of_a_server_ends_the_run(ends: Ends, who: int) -> None:
    for ended in ends(who, "die", strategy="aggregation=asynchronous servers=2"):
        assert ended is None or (
            ended[0] in ("WorkerError", "ServerLostError") and "died, and its slice of A with it" in ended[1]
        )


@pytest.mark.parametrize("settings", [{}, {"on_death": "continue"}])
def test_so_does_one_that_is_stopped(ends: Ends, settings: dict[str, Any]) -> None:
    strategy = "aggregation=asynchronous servers=2"
    for ended in ends(1, "stop", strategy=strategy, timeout_s=5.0, suspect_after_s=1.0, **settings):
        assert ended is None or "server 1 has not answered the first for 5 s" in ended[1]


def test_a_silent_replica_leaves_where_that_is_asked_for(ends: Ends) -> None:
    first, other, _ = ends(2, "stop", on_death="continue", suspect_after_s=1.0)
    assert first == other
    assert [replica for replica, _ in first[2]] == [2]
    assert "silent" in first[2][0][1]


def test_what_a_loop_raises_all_ranks_raise(ends: Ends) -> None:
    found = ends(1, "raise")
    assert [kind for kind, *_ in found] == ["WorkerError", "ValueError", "WorkerError"]
    assert all("as it was asked to" in told for _, told, *_ in found)


@pytest.mark.parametrize("who", [0, 2])
def test_or_its_replica_leaves_and_the_others_go_on(ends: Ends, who: int) -> None:
    found = ends(who, "raise", on_death="continue")
    assert found[who][0] == "ValueError"
    for kind, _, left, _ in (found[rank] for rank in range(3) if rank != who):
        assert kind == ""
        assert [replica for replica, _ in left] == [who]
        assert "as it was asked to" in left[0][1]


def test_ctrl_c_ends_all_ranks_with_what_there_is(ends: Ends) -> None:
    for kind, updates, left, interrupted in ends(1, "interrupt", seconds=60.0):
        assert (kind, left, interrupted) == ("", [], True)
        assert updates > 0
