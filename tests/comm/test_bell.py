import os

from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer
from paceline.comm.wakeup import EventFd, Poller


def test_rings_add_up_to_one_and_wait_until_cleared() -> None:
    bell = EventFd()
    assert not bell.wait(0)
    bell.clear()
    bell.ring()
    bell.ring()
    assert bell.wait(0)
    assert bell.wait(None)
    bell.clear()
    assert not bell.wait(0.001)
    bell.close()
    bell.close()


def test_a_full_counter_still_rings() -> None:
    bell = EventFd()
    os.eventfd_write(bell.fileno(), 2**64 - 2)
    bell.ring()
    assert bell.wait(0)
    bell.clear()
    assert not bell.wait(0)
    bell.close()


def test_two_processes_ring_each_other(fork_server: ForkServer) -> None:
    asked, answered = EventFd(), EventFd()
    child = fork_server.spawn("comm_entries:answer_bell", {"times": 100}, [asked.fileno(), answered.fileno()])
    for _ in range(100):
        asked.ring()
        assert answered.wait(60)
        answered.clear()
    assert liveness.wait_gone([child.pidfd], 60)
    assert fork_server.status(child.pid) == "exit code 0"
    asked.close()
    answered.close()


def test_a_waiter_names_who_rang() -> None:
    before = os.listdir("/proc/self/fd")
    bells, waiter = [EventFd() for _ in range(5)], Poller[int]()
    for i, bell in enumerate(bells):
        waiter.add(bell.fileno(), i)
    assert waiter.wait(0.001) == []
    bells[3].ring()
    bells[1].ring()
    assert sorted(waiter.wait(None)) == [1, 3]
    waiter.remove(bells[3].fileno())
    bells[1].clear()
    assert waiter.wait(0) == []
    waiter.close()
    for bell in bells:
        bell.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_waiter_sees_a_process_end(fork_server: ForkServer) -> None:
    waiter = Poller[str]()
    child = fork_server.spawn("comm_entries:hang", {})
    waiter.add(child.pidfd, "gone")
    assert waiter.wait(0) == []
    liveness.kill(child.pidfd)
    assert waiter.wait(60) == ["gone"]
    waiter.close()
