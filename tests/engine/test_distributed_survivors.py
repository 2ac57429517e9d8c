"""Ranks go on when others die: what they train is what one process computes that leaves out the dead from then on."""

import functools
import pickle
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Program
from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer
from paceline.replica.autograd import step_seed
from tests import ranks
from tests.engine.distributed_cases import CASES
from tests.engine.local.commands import eventually
from tests.engine.test_distributed_parity import ROUNDING
from tests.oracle import Plain, Values, mean_into, order

SCRIPT = Path(__file__).with_name("distributed_survivors_script.py")
STEPS = 8
KILLED = "killed by SIGKILL"
PHASES = ("before exchange", "in exchange", "before update", "after update")

Survive = Callable[..., dict[int, Any]]


@pytest.fixture
def survive(fork_server: ForkServer, tmp_path: Path) -> Survive:
    """Lets ranks train while some die, and returns what the others have found, by rank."""

    def run(backend: str, case: str, *points: str, size: int, dead: set[int], steps: int = STEPS) -> dict[int, Any]:
        words = (backend, case, str(steps), *points)
        children = ranks.spawned(fork_server, SCRIPT, *words, size=size, folder=tmp_path)
        ended = ranks.statuses(fork_server, children)
        said = "\n".join(ranks.said(tmp_path, rank).read_text() for rank in range(size))
        assert [status != ranks.WELL for status in ended] == [rank in dead for rank in range(size)], said
        return {rank: found_by(tmp_path, rank) for rank in range(size) if rank not in dead}

    return run


def found_by(folder: Path, rank: int) -> Any:
    """What a rank has left."""
    return pickle.loads((folder / f"survived.{rank}").read_bytes())


def one_process(program: Program, replicas: int, steps: int, last: Mapping[int, int]) -> Values:
    """Replica by replica, the mean of the gradients of those that take part in a step; ``last``: of the dead.

    What the dead have left of an epoch the others take before they begin the next one.
    """
    plain, data = Plain(program), order(program, replicas)
    taken, rounds, returned = [0] * replicas, data.rounds_per_epoch(0), list[tuple[int, int]]()
    for k in range(steps):
        before, total, buffers = plain.values(), {n: torch.zeros_like(p) for n, p in plain.trained.items()}, {}
        batches, lost = {}, list[tuple[int, int]]()
        # Who dies in a step was there when its batches were given out.
        for replica in [r for r in range(replicas) if k <= last.get(r, steps) + 1]:
            left = [s for s in last if last[s] + 1 < k]
            for each in left:
                while not data.size(each, taken[each]):
                    taken[each] += 1
            heads = [*((s, taken[s]) for s in [*left, replica]), *returned]
            _, _, stream, number = min((n // rounds, s != replica, s, n) for s, n in heads)
            if (stream, number) in returned:
                returned.remove((stream, number))
            else:
                taken[stream] += 1
            if k <= last.get(replica, steps):
                batches[replica] = data.batch(stream, number)
            else:
                lost.append((stream, number))
        for stream, number in lost:
            if taken[stream] == number + 1:
                taken[stream] -= 1
            else:
                returned.append((stream, number))
        samples = sum(map(len, batches.values()))
        for replica, batch in batches.items():
            if len(batch):
                gradient = plain.load(before).gradient(batch, step_seed(program.seed, replica, k))
                mean_into(total, gradient, len(batch) / samples)
                mean_into(buffers, dict(plain.module.named_buffers()), len(batch) / samples)
        plain.load(before | buffers).step(total)
    return plain.values()


def assert_same(found: Mapping[str, Any], expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=ROUNDING, atol=ROUNDING, msg=functools.partial(_of, name))


def _of(name: str, message: str) -> str:
    return f"{name}: {message}"


def agreed(found: Mapping[int, Any]) -> Any:
    """What all survivors have found, which is the same to the bit."""
    first, *others = found.values()
    assert isinstance(first, dict), first
    for other in others:
        assert isinstance(other, dict), other
        assert other["left"] == first["left"]
        assert other["history"] == first["history"]
        for name, value in first["state"].items():
            assert torch.equal(other["state"][name], value), name
    return first


@pytest.mark.parametrize("backend", ["shm", "gloo", "hierarchical"])
@pytest.mark.parametrize("phase", PHASES)
def test_survivors_train_as_one_process_without_the_dead(survive: Survive, backend: str, phase: str) -> None:
    run = agreed(survive(backend, "momentum", f"{phase}:2:3", size=3, dead={2}))
    program = CASES["momentum"].program
    without, including = (one_process(program, 3, STEPS, {2: last}) for last in (2, 3))
    ((replica, reason),) = ((each.replica, each.reason) for each in run["left"])
    assert (replica, reason) == (2, KILLED)
    assert run["summary"]["updates"] == STEPS
    counted = run["summary"]["applied"] - (STEPS * 2 + 3)  # whether its last Δ was in the sum that the others completed
    assert counted == {"before exchange": 0, "in exchange": counted, "before update": 1, "after update": 1}[phase]
    assert_same(run["state"], including if counted else without)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("case", ["momentum", "adam", "lamb", "scheduler", "running means", "two dtypes", "masks"])
def test_one_that_has_missed_a_result_receives_what_it_led_to(survive: Survive, backend: str, case: str) -> None:
    run = agreed(survive(backend, case, "result missed:1:3", "before exchange:2:5", size=3, dead={2}))
    assert_same(run["state"], one_process(CASES[case].program, 3, STEPS, {2: 4}))
    assert run["summary"]["applied"] == STEPS * 2 + 5


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_first_result_of_all_may_be_missed(survive: Survive, backend: str) -> None:
    run = agreed(survive(backend, "adam", "result missed:1:0", "before update:0:0", size=3, dead={0}))
    assert_same(run["state"], one_process(CASES["adam"].program, 3, STEPS, {0: 0}))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("points", "last"),
    [
        (("before exchange:1:3", "before exchange:2:3"), {1: 2, 2: 2}),
        (("before exchange:0:3",), {0: 2}),
        (("after update:0:2", "before exchange:2:3"), {0: 2, 2: 2}),
        (("before exchange:0:2", "before update:1:5"), {0: 1, 1: 5}),
        (("before exchange:1:0",), {1: -1}),
    ],
    ids=["two at once", "the first", "one after the other", "all but one", "before any update"],
)
def test_several_die(survive: Survive, backend: str, points: tuple[str, ...], last: dict[int, int]) -> None:
    run = agreed(survive(backend, "momentum", *points, "checkpoint", size=3, dead=set(last)))
    assert_same(run["state"], one_process(CASES["momentum"].program, 3, STEPS, last))
    assert sorted(each.replica for each in run["left"]) == sorted(last)
    assert run["summary"]["notes"]["checkpoint_updates"] == STEPS  # whoever is the first has written it
    assert run["history"][-1]["updates"] == STEPS


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_one_that_is_stopped_is_left_out_and_takes_no_part_when_it_goes_on(
    fork_server: ForkServer, tmp_path: Path, backend: str
) -> None:
    words = (backend, "momentum", str(STEPS), "stop:2:3")
    children = ranks.spawned(fork_server, SCRIPT, *words, size=3, folder=tmp_path)
    assert ranks.statuses(fork_server, children[:2]) == [ranks.WELL] * 2, ranks.said(tmp_path, 0).read_text()
    liveness.kill(children[2].pidfd, signal.SIGCONT)
    assert ranks.statuses(fork_server, children[2:]) == [ranks.WELL]
    found = {rank: found_by(tmp_path, rank) for rank in range(3)}
    kind, text = found.pop(2)
    assert (kind, text) == ("WaitTimeoutError", "rank 2 asked to join the run again, but it is over")
    said = ranks.said(tmp_path, 2).read_text()
    assert re.search(r"rank 2 .* said nothing for [1-9].* s, and the others go on without it; ", said)
    run = agreed(found)
    assert_same(run["state"], one_process(CASES["momentum"].program, 3, STEPS, {2: 2}))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_one_of_two_waits_for_the_other_while_that_may_live(
    fork_server: ForkServer, tmp_path: Path, backend: str
) -> None:
    words = (backend, "momentum", str(STEPS), "stop:1:3")
    children = ranks.spawned(fork_server, SCRIPT, *words, size=2, folder=tmp_path)
    waits = r"rank 1 .* said nothing for [1-9].* s; ranks \[0\] are no majority without them, and wait"
    eventually(lambda: re.search(waits, ranks.said(tmp_path, 0).read_text()))
    liveness.kill(children[1].pidfd, signal.SIGCONT)
    assert ranks.statuses(fork_server, children) == [ranks.WELL] * 2, ranks.said(tmp_path, 0).read_text()
    run = agreed({rank: found_by(tmp_path, rank) for rank in range(2)})
    assert run["left"] == []
    assert_same(run["state"], one_process(CASES["momentum"].program, 2, STEPS, {}))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_one_of_two_goes_on_if_the_other_is_dead(survive: Survive, backend: str) -> None:
    run = agreed(survive(backend, "momentum", "before exchange:0:3", size=2, dead={0}))
    assert_same(run["state"], one_process(CASES["momentum"].program, 2, STEPS, {0: 2}))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_exception_is_a_death(survive: Survive, backend: str) -> None:
    found = survive(backend, "momentum", "raise:1:2", size=3, dead=set())
    kind, text = found.pop(1)
    assert kind == "WorkerError"
    assert "ValueError: the tape is torn" in text
    run = agreed(found)
    assert [each.reason for each in run["left"]] == ["failed: ValueError: the tape is torn"]
    assert_same(run["state"], one_process(CASES["momentum"].program, 3, STEPS, {1: 2}))


JOIN = Path(__file__).with_name("distributed_join_script.py")


def joined(fork_server: ForkServer, folder: Path, backend: str, case: str, dying: int, *words: str) -> dict[int, Any]:
    """What three ranks have found, one of which died and was started again."""
    arguments = (backend, case, str(dying), *words)
    first = ranks.spawned(fork_server, JOIN, *arguments, size=3, folder=folder)
    dead = first.pop(dying)
    assert ranks.statuses(fork_server, [dead]) == [KILLED], ranks.said(folder, dying).read_text()
    again = ranks.spawned(fork_server, JOIN, *arguments, size=3, folder=folder, ranks=[dying])
    ended = ranks.statuses(fork_server, [*again, *first])
    assert ended == [ranks.WELL] * 3, "\n".join(ranks.said(folder, rank).read_text() for rank in range(3))
    return {rank: found_by(folder, rank) for rank in range(3)}


def by_stream(taken: list[tuple[int, int]]) -> list[list[int]]:
    """Return the numbers of the batches that were taken of each stream."""
    return [[number for each, number in taken if each == stream] for stream in range(3)]


Rounds = list[list[tuple[int, int, int, int]]]


def replayed(program: Program, rounds: Rounds) -> Values:
    """One process that makes these rounds."""
    plain, data = Plain(program), order(program, 3)
    for members in rounds:
        before, total, buffers = plain.values(), {n: torch.zeros_like(p) for n, p in plain.trained.items()}, {}
        batches = [(replica, clock, data.batch(stream, number)) for replica, stream, number, clock in members]
        samples = sum(len(batch) for _, _, batch in batches)
        for replica, clock, batch in batches:
            if len(batch):  # else it is the end of an epoch
                gradient = plain.load(before).gradient(batch, step_seed(program.seed, replica, clock))
                mean_into(total, gradient, len(batch) / samples)
                mean_into(buffers, dict(plain.module.named_buffers()), len(batch) / samples)
        plain.load(before | buffers).step(total)
    return plain.values()


@pytest.mark.parametrize("backend", ["shm", "gloo", "hierarchical"])
@pytest.mark.parametrize(("case", "dying"), [("momentum", 2), ("adam", 0), ("lamb", 1), ("masks", 2)])
def test_a_rank_that_is_started_again_joins_where_the_others_are(
    fork_server: ForkServer, tmp_path: Path, backend: str, case: str, dying: int
) -> None:
    found = joined(fork_server, tmp_path, backend, case, dying)
    assert [rank for rank in range(3) if found[rank].pop("main")] == [1 if dying == 0 else 0]
    run = agreed(found)
    assert [each.replica for each in run["left"]] == [dying]
    others = [found[rank]["rounds"] for rank in range(3) if rank != dying]
    assert others[0] == others[1]
    own = found[dying]["rounds"]
    assert len(own) >= 5
    assert others[0][-len(own) :] == own
    assert sum(dying in [replica for replica, *_ in members] for members in own) >= 5
    taken = [(stream, number) for members in others[0] for _, stream, number, _ in members]
    assert len(taken) == len(set(taken)), "a batch was taken twice"
    missing = {(s, k) for s, last in enumerate(map(max, by_stream(taken))) for k in range(last)} - set(taken)
    sizes = [len(order(CASES[case].program, 3).batch(*each)) for each in missing]
    assert not any(sizes), "a batch was left out"
    assert_same(run["state"], replayed(CASES[case].program, others[0]))


def test_one_that_would_do_another_job_does_not_join_and_the_others_go_on(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    arguments = ("shm", "momentum", "2", "wrong")
    first = ranks.spawned(fork_server, JOIN, *arguments, size=3, folder=tmp_path)
    assert ranks.statuses(fork_server, [first.pop()]) == [KILLED]
    again = ranks.spawned(fork_server, JOIN, *arguments, size=3, folder=tmp_path, ranks=[2])
    assert ranks.statuses(fork_server, again) == [ranks.WELL]
    kind, text = found_by(tmp_path, 2)
    assert (kind, "amount=90.0" in text, "amount=95.0" in text) == ("WorkerError", True, True), text
    (tmp_path / "enough").touch()
    assert ranks.statuses(fork_server, first) == [ranks.WELL] * 2
    run = agreed({rank: found_by(tmp_path, rank) for rank in range(2)})
    assert [each.replica for each in run["left"]] == [2, 2]
