"""Ranks that meet: all come to the same conclusion about who has come, and what contradicts what."""

import os
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from paceline.core.errors import InputError, PacelineError, WaitTimeoutError
from paceline.engine.spmd import rendezvous
from paceline.engine.spmd.rendezvous import attend, holder_of, job_store

PATIENCE_S = 60.0
"""Longest wait of a test that is to succeed."""


def told(function: Callable[[], Any]) -> str:
    """The error of a function, or nothing."""
    try:
        function()
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def meet(
    *ranks: tuple[int, int], terms: dict[int, dict[str, str]] | None = None, timeout_s: float = PATIENCE_S
) -> list[str]:
    """What ranks, each (rank, number of ranks), are told that come at once."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=PATIENCE_S))

    def one(index: int) -> str:
        rank, size = ranks[index]
        return told(lambda: attend(store, rank, size, (terms or {}).get(index, {}), timeout_s))

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


@pytest.fixture(autouse=True)
def _no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LINGER_S", 0.0)


def test_all_that_come_once_begin() -> None:
    assert meet((0, 3), (1, 3), (2, 3)) == ["", "", ""]


@pytest.mark.parametrize(
    ("ranks", "terms", "named"),
    [
        pytest.param([(0, 3), (1, 3), (1, 3)], {}, r"rank 1 was started twice: process \d+", id="twice"),
        pytest.param([(0, 2), (0, 2)], {}, "rank 0 was started twice", id="rank 0 twice"),
        pytest.param([(0, 2), (1, 3)], {}, r"number of ranks is [23] in rank [01] \(process \d+", id="size"),
        pytest.param([(0, 2), (1, 2)], {1: {"strategy": "a"}, 0: {"strategy": "b"}}, "strategy is ", id="strategy"),
        pytest.param([(0, 2), (1, 2)], {1: {"backend": "shm"}, 0: {"backend": "gloo"}}, "backend is ", id="backend"),
        pytest.param([(0, 2), (1, 2)], {1: {"version of torch": "1.0"}}, "version of torch is ", id="torch"),
        pytest.param([(0, 2), (1, 2)], {0: {"version of Paceline": "0"}}, "version of Paceline is ", id="paceline"),
    ],
)  # fmt: skip
def test_what_contradicts_another_ends_all_with_one_sentence(
    ranks: list[tuple[int, int]], terms: dict[int, dict[str, str]], named: str
) -> None:
    first, *others = meet(*ranks, terms=terms)
    assert re.match(f"PacelineError: {named}", first)
    assert others == [first] * len(others)


def test_who_does_not_come_is_named() -> None:
    first, second = meet((0, 4), (2, 4), timeout_s=0.2)
    assert re.match(r"WaitTimeoutError: rank 0 waited 0.2 s for ranks 1, 3 of 4, and only rank \d \(process", first)
    assert second.startswith("WaitTimeoutError: rank 2 waited")


def test_one_that_comes_after_all_have_is_refused_alone() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: attend(store, rank, 2, {}, PATIENCE_S), range(2)))
    assert "rank 1 was started twice" in told(lambda: attend(store, 1, 2, {}, PATIENCE_S))
    assert "number of ranks is 2 in rank" in told(lambda: attend(store, 2, 3, {}, PATIENCE_S))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_none_is_refused(rank: int) -> None:
    with pytest.raises(InputError, match=f"RANK={rank} WORLD_SIZE=2: ranks are 0 to WORLD_SIZE - 1"):
        attend(HashStore(), rank, 2, {}, PATIENCE_S)


def test_arrivals_of_an_earlier_start_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent keeps the store when it starts ranks again."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = HashStore()
    with monkeypatch.context() as earlier:
        earlier.setattr(os, "getpid", lambda: 1 << 30)  # no process has it
        assert "waited" in told(lambda: attend(store, 0, 2, {}, 0.1))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda rank: told(lambda: attend(store, rank, 2, {}, PATIENCE_S)), range(2))) == ["", ""]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port that was free a moment ago, as MASTER_PORT."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return port


def test_the_store_listens_at_its_address_alone(address: int) -> None:
    store = job_store(0, PATIENCE_S)
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [row.split() for row in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{address:04X}")]
    assert listening == [f"0100007F:{address:04X}"]
    store.set("key", "value")
    assert job_store(1, PATIENCE_S).get("key") == b"value"


def test_two_processes_that_are_rank_0_meet_in_one_store(address: int) -> None:
    stores = [PrefixStore("job", job_store(0, PATIENCE_S)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda store: told(lambda: attend(store, 0, 2, {}, PATIENCE_S)), stores))
    assert all("rank 0 was started twice" in each for each in said)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "another protocol"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch, address: int, answer: bytes, rank: int) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_S", 1.0)
    connections = []

    def serve(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed
                return
            connections.append(connection)
            if answer:
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", address)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        with pytest.raises(InputError, match=rf"MASTER_PORT={address}: process {os.getpid()} \(.*\) listens there"):
            job_store(rank, PATIENCE_S)
        server.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()
    for thread in threading.enumerate():  # it would connect again for as long as a job may take to start
        if thread.name.startswith("paceline-what listens"):
            thread.join(10 * rendezvous.ANSWER_S)
            assert not thread.is_alive()


def test_a_missing_rank_0_is_named(address: int) -> None:
    with pytest.raises(WaitTimeoutError, match=r"rank 1 waited .* for rank 0 to listen"):
        job_store(1, 0.3)


@pytest.mark.parametrize(("name", "value"), [("MASTER_ADDR", ""), ("MASTER_PORT", "http"), ("MASTER_PORT", "70000")])
def test_an_address_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: int, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="is no address at which ranks could meet"):
        job_store(0, 1.0)


def test_nobody_holds_a_port_that_is_free(address: int) -> None:
    assert holder_of(address) == "another program listens there"
