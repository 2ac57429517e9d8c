"""Eventfds, pollers, and wakeups that make a system call only if the receiver sleeps."""

import os
import threading
from typing import Any

import pytest

from paceline.comm import liveness
from paceline.comm import wakeup as module
from paceline.comm.fork_server import ForkServer
from paceline.comm.wakeup import FENCED, OWN_CORE, SHARED_CORES, EventFd, Poller, Wakeup


def test_an_eventfd_stays_set_until_it_is_cleared() -> None:
    event = EventFd()
    assert not event.wait(0)
    event.clear()
    event.set()
    event.set()
    assert event.wait(0)
    assert event.wait(None)
    event.clear()
    assert not event.wait(0.001)
    event.close()
    event.close()


def test_a_full_counter_is_set() -> None:
    event = EventFd()
    os.eventfd_write(event.fileno(), 2**64 - 2)
    event.set()
    assert event.wait(0)
    event.clear()
    assert not event.wait(0)
    event.close()


def test_two_processes_wake_each_other(fork_server: ForkServer) -> None:
    first, second = EventFd(), EventFd()
    child = fork_server.spawn("comm_entries:answer_eventfd", {"times": 100}, [first.fileno(), second.fileno()])
    for _ in range(100):
        first.set()
        assert second.wait(60)
        second.clear()
    assert liveness.wait_gone([child.pidfd], 60)
    assert fork_server.status(child.pid) == "exit code 0"
    first.close()
    second.close()


def test_a_poller_returns_the_tokens_of_readable_descriptors() -> None:
    before = os.listdir("/proc/self/fd")
    events, poller = [EventFd() for _ in range(5)], Poller[int]()
    for i, event in enumerate(events):
        poller.add(event.fileno(), i)
    assert poller.wait(0.001) == []
    events[3].set()
    events[1].set()
    assert sorted(poller.wait(None)) == [1, 3]
    poller.remove(events[3].fileno())
    events[1].clear()
    assert poller.wait(0) == []
    poller.close()
    for event in events:
        event.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_poller_reports_the_end_of_a_process(fork_server: ForkServer) -> None:
    poller = Poller[str]()
    child = fork_server.spawn("comm_entries:hang", {})
    poller.add(child.pidfd, "gone")
    assert poller.wait(0) == []
    liveness.kill(child.pidfd)
    assert poller.wait(60) == ["gone"]
    poller.close()


@pytest.fixture
def word() -> "memoryview[int]":
    return memoryview(bytearray(8)).cast("q")


@pytest.fixture
def wakeup(word: Any) -> Any:
    event = EventFd()
    yield Wakeup(event, word)
    event.close()


@pytest.mark.skipif(not FENCED, reason="this machine has to make a system call for each store")
def test_a_receiver_that_is_awake_costs_no_system_call(wakeup: Wakeup, word: Any) -> None:
    wakeup.notify()
    assert not wakeup.event.wait(0)
    word[0] = 1
    wakeup.notify()
    assert wakeup.event.wait(0)
    assert word[0] == 0  # the next notification makes no system call


def test_without_fences_every_notification_sets_the_event(wakeup: Wakeup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FENCED", False)
    wakeup.notify()
    assert wakeup.event.wait(0)


def test_a_ready_receiver_does_not_block(wakeup: Wakeup, word: Any) -> None:
    seen: list[int] = []

    def ready() -> bool:
        seen.append(word[0])
        return True

    wakeup.sleep(ready, lambda seconds: pytest.fail("blocked"), 1000.0)
    assert seen == [1]  # the word was set before the last poll
    assert word[0] == 0


def test_no_sleep_is_longer_than_its_timeout_or_the_doze(wakeup: Wakeup) -> None:
    bounds: list[float] = []
    for timeout_s in (0.25, 1000.0):
        wakeup.sleep(lambda: False, bounds.append, timeout_s)
    assert bounds == [0.25, module.DOZE_S]


def test_long_waits_are_polled_less_and_less(wakeup: Wakeup, monkeypatch: pytest.MonkeyPatch) -> None:
    polls, now = 0, 0

    def never() -> bool:
        nonlocal polls
        polls += 1
        return False

    def polls_before(wait_ns: int) -> int:
        """Count the polls before a sleep that ends so long after the first poll."""
        nonlocal polls, now
        polls = 0
        assert not wakeup.spin(never)
        counted = polls
        now += wait_ns
        wakeup.sleep(never, lambda seconds: None, 1.0)
        return counted

    monkeypatch.setattr(module.time, "monotonic_ns", lambda: now)
    long = SHARED_CORES.short_ns
    short = long - 1
    assert [polls_before(long) for _ in range(9)] == [65, 33, 17, 9, 5, 3, 2, 1, 1]
    assert [polls_before(ns) for ns in (short, short, long, long)] == [1, 65, 65, 33]
    assert wakeup.spin(lambda: True)


def test_a_core_of_its_own_is_kept_for_longer_unless_a_yield_gives_it_away(
    word: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, yield_ns, yields = 0, 1000, 0

    def give_way() -> None:
        nonlocal now, yields
        now, yields = now + yield_ns, yields + 1

    def yields_in_a_wait() -> int:
        nonlocal yields
        yields = 0
        assert not wakeup.spin(lambda: False)
        wakeup.sleep(lambda: False, lambda seconds: None, 1.0)
        return yields

    monkeypatch.setattr(module.time, "monotonic_ns", lambda: now)
    monkeypatch.setattr(module.os, "sched_yield", give_way)
    wakeup = Wakeup(EventFd(), word, polling=OWN_CORE)
    assert yields_in_a_wait() == OWN_CORE.polls
    yield_ns = module.DISPLACED_NS + 1
    assert yields_in_a_wait() == 1
    yield_ns = 1000
    assert yields_in_a_wait() <= SHARED_CORES.polls  # another program has the core
    for contended_ns in (module.CONTENDED_NS, 2 * module.CONTENDED_NS, 4 * module.CONTENDED_NS):
        now += contended_ns
        assert yields_in_a_wait() <= SHARED_CORES.polls  # as many as before
        yield_ns = module.DISPLACED_NS + 1
        assert yields_in_a_wait() == 1  # again, so it is left alone for twice as long
        yield_ns = 1000
    now += module.MAX_CONTENDED_NS
    yields_in_a_wait()
    assert yields_in_a_wait() == OWN_CORE.polls
    wakeup.event.close()


@pytest.mark.parametrize(
    ("wait_ns", "worked_ns", "busy_ns"),
    [
        (50_000, 1_000_000, 100_000),  # twice what it takes
        (50_000, 100_000, 0),  # as long as all the work
        (module.MAX_BUSY_NS, 10**9, 0),  # too long for any wait
    ],
)
def test_the_processor_is_kept_for_a_short_wait_after_long_work(
    wakeup: Wakeup, monkeypatch: pytest.MonkeyPatch, wait_ns: int, worked_ns: int, busy_ns: int
) -> None:
    now, yields = 0, list[int]()

    def clock() -> int:
        nonlocal now
        now += 1000
        return now

    monkeypatch.setattr(module.time, "monotonic_ns", clock)
    monkeypatch.setattr(module.os, "sched_yield", lambda: yields.append(now))
    wakeup.expect(wait_ns, worked_ns)
    began = now
    wakeup.spin(lambda: False)
    assert busy_ns <= yields[0] - began <= busy_ns + 3000  # each reading of the clock takes a microsecond here


@pytest.mark.parametrize("spins", [True, False])
def test_no_notification_is_lost(spins: bool) -> None:
    """Two threads hand a number to and fro; with no doze to end a sleep, a lost one would be a hang."""
    events = EventFd(), EventFd()
    words = memoryview(bytearray(16)).cast("q")
    wakeups = [Wakeup(event, words[i : i + 1]) for i, event in enumerate(events)]
    turn = memoryview(bytearray(8)).cast("q")
    rounds = 3000

    def play(me: int) -> None:
        own, other = wakeups[me], wakeups[1 - me]
        for k in range(me, 2 * rounds, 2):
            while turn[0] != k:
                if not (spins and own.spin(lambda k=k: turn[0] == k)):
                    own.sleep(lambda k=k: turn[0] == k, lambda seconds: own.event.wait(60), 60)
            turn[0] = k + 1
            other.notify()

    players = [threading.Thread(target=play, args=(me,), daemon=True) for me in (0, 1)]
    for player in players:
        player.start()
    for player in players:
        player.join(60)
    assert turn[0] == 2 * rounds
    for event in events:
        event.close()
