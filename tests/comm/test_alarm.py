"""An alarm wakes whoever sleeps, and rings for nobody else."""

import threading
from typing import Any

import pytest

from paceline.comm import wakeup as module
from paceline.comm.wakeup import FENCED, EventFd, Wakeup


@pytest.fixture
def word() -> "memoryview[int]":
    return memoryview(bytearray(8)).cast("q")


@pytest.fixture
def alarm(word: Any) -> Any:
    bell = EventFd()
    yield Wakeup(bell, word)
    bell.close()


@pytest.mark.skipif(not FENCED, reason="this machine's stores need a ring each")
def test_who_is_awake_is_not_rung(alarm: Wakeup, word: Any) -> None:
    alarm.ring()
    assert not alarm.bell.wait(0)
    word[0] = 1
    alarm.ring()
    assert alarm.bell.wait(0)
    assert word[0] == 0  # the next one need not ring


def test_without_fences_every_ring_rings(alarm: Wakeup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FENCED", False)
    alarm.ring()
    assert alarm.bell.wait(0)


def test_who_has_something_to_see_does_not_block(alarm: Wakeup, word: Any) -> None:
    seen: list[int] = []

    def ready() -> bool:
        seen.append(word[0])
        return True

    alarm.sleep(ready, lambda seconds: pytest.fail("blocked"), 1000.0)
    assert seen == [1]  # it had said before that it would sleep
    assert word[0] == 0


def test_nobody_sleeps_for_longer_than_asked(alarm: Wakeup) -> None:
    bounds: list[float] = []
    for asked in (0.25, 1000.0):
        alarm.sleep(lambda: False, bounds.append, asked)
    assert bounds == [0.25, module.DOZE_S]


def test_long_waits_are_looked_for_less_and_less(alarm: Wakeup, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, now = 0, 0

    def never() -> bool:
        nonlocal looks
        looks += 1
        return False

    def looked_for(wait_ns: int) -> int:
        """How often was looked before a sleep that ended so long after the first look."""
        nonlocal looks, now
        looks = 0
        assert not alarm.spin(never)
        counted = looks
        now += wait_ns
        alarm.sleep(never, lambda seconds: None, 1.0)
        return counted

    monkeypatch.setattr(module.time, "monotonic_ns", lambda: now)
    long, short = module.SHORT_NS, module.SHORT_NS - 1
    assert [looked_for(long) for _ in range(9)] == [65, 33, 17, 9, 5, 3, 2, 1, 1]
    assert [looked_for(ns) for ns in (short, short, long, long)] == [1, 65, 65, 33]
    assert alarm.spin(lambda: True)


@pytest.mark.parametrize(
    ("wait_ns", "worked_ns", "held_ns"),
    [
        (50_000, 1_000_000, 100_000),  # twice what it takes
        (50_000, 100_000, 0),  # as long as all the work
        (module.MOST_HELD_NS, 10**9, 0),  # too long for anybody
    ],
)
def test_the_processor_is_held_for_a_short_wait_after_long_work(
    alarm: Wakeup, monkeypatch: pytest.MonkeyPatch, wait_ns: int, worked_ns: int, held_ns: int
) -> None:
    now, yields = 0, list[int]()

    def clock() -> int:
        nonlocal now
        now += 1000
        return now

    monkeypatch.setattr(module.time, "monotonic_ns", clock)
    monkeypatch.setattr(module.os, "sched_yield", lambda: yields.append(now))
    alarm.expect(wait_ns, worked_ns)
    began = now
    alarm.spin(lambda: False)
    assert held_ns <= yields[0] - began <= held_ns + 3000  # each look at the clock takes a microsecond here


@pytest.mark.parametrize("spins", [True, False])
def test_no_wake_is_lost(spins: bool) -> None:
    """Two threads hand a number to and fro; with no doze to end a sleep, a lost wake would be a hang."""
    bells = EventFd(), EventFd()
    words = memoryview(bytearray(16)).cast("q")
    alarms = [Wakeup(bell, words[i : i + 1]) for i, bell in enumerate(bells)]
    turn = memoryview(bytearray(8)).cast("q")
    rounds = 3000

    def play(me: int) -> None:
        mine, other = alarms[me], alarms[1 - me]
        for k in range(me, 2 * rounds, 2):
            while turn[0] != k:
                if not (spins and mine.spin(lambda k=k: turn[0] == k)):
                    mine.sleep(lambda k=k: turn[0] == k, lambda seconds: mine.bell.wait(60), 60)
            turn[0] = k + 1
            other.ring()

    players = [threading.Thread(target=play, args=(me,), daemon=True) for me in (0, 1)]
    for player in players:
        player.start()
    for player in players:
        player.join(60)
    assert turn[0] == 2 * rounds
    for bell in bells:
        bell.close()
