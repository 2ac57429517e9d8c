"""Processes that die, are refused or are interrupted while others train, and servers that are no more."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline import CallbackError, InputError, NonFiniteError, WorkerError
from paceline.callbacks import Callback
from paceline.core.records import ReplicaExit
from paceline.engine.server import wire
from paceline.engine.server.wire import StreamAddress
from tests.engine.local.commands import eventually
from tests.engine.serving.joining_script import BATCH
from tests.engine.serving.serving_cases import Script, Served, beside, gradient_step, rows, start, state_of

Serve = Callable[..., Served]

MOMENTS = ["computing", "connected", "joined", "push", "pushed", "received", "leaving"]


def steps(model: torch.nn.Module, optimizer: Any, until: Callable[[], Any]) -> int:
    """Make steps until something is so, and two more; return how many."""
    made = 0

    def one() -> bool:
        nonlocal made
        made += 1
        gradient_step(model, BATCH)
        optimizer.step()
        return bool(until())

    eventually(one)
    for _ in range(2):
        one()
    return made


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_that_is_killed_leaves_the_others_going(
    served: Serve, script: Callable[[str], Script], moment: str
) -> None:
    # Synchronous: whoever waits for the dead one would wait for ever.
    server = served("replicas=1..2 aggregation=synchronous")
    with server.joined() as (_, model, optimizer):
        other = script(moment)
        made = steps(model, optimizer, lambda: other.process.poll() is not None)
        assert other.ended()[0] == -signal.SIGKILL
        # Its place is free again, for a process of the same number.
        eventually(lambda: len(rows(server.out)) == 1)
        with server.joined() as (second, _, _):
            assert second.replica == 1
    run = server.run()
    assert_made(run, made)
    deaths = [(exit.replica, exit.reason) for exit in run.left]
    # Who has not joined, or has left, is not missed.
    assert deaths == ([] if moment in ("connected", "leaving") else [(1, "its connection ended")])


def assert_made(run: paceline.Run, made: int) -> None:
    """All updates of the one that stays were made, and A is finite."""
    assert made <= run.summary["updates"]
    assert all(torch.isfinite(tensor).all() for tensor in run.state.values())


def test_what_a_loop_raises_is_its_own_and_the_server_notes_it(served: Serve, script: Callable[[str], Script]) -> None:
    told = Departures()
    server = served("replicas=1..2 aggregation=synchronous", callbacks=[told])
    with server.joined() as (_, model, optimizer):
        other = script("raises")
        steps(model, optimizer, lambda: other.process.poll() is not None)
        status, _, err = other.ended()
        assert status == 1
        assert err.rstrip().endswith("ValueError: it is my own")
    run = server.run()
    assert [(exit.replica, exit.reason) for exit in run.left] == [(1, "raised ValueError: it is my own")]
    assert told.departures == run.left


class Departures(Callback):
    """Keeps who has left."""

    def __init__(self) -> None:
        self.departures: list[ReplicaExit] = []

    def on_departure(self, exit: ReplicaExit, run: Any) -> None:
        self.departures.append(exit)


def test_who_dies_before_training_begins_is_replaced_by_who_joins(
    served: Serve, script: Callable[[str], Script]
) -> None:
    server = served("replicas=2..2 aggregation=synchronous")
    assert script("joined").ended()[0] == -signal.SIGKILL
    eventually(lambda: rows(server.out) == {})

    def trains() -> int:
        with server.joined() as (worker, model, optimizer):
            for _ in range(3):
                gradient_step(model, BATCH)
                optimizer.step()
        return worker.replica

    assert sorted(beside(trains, trains)) == [0, 1]
    assert server.run().summary["updates"] == 3


def test_a_callback_that_fails_ends_the_run_and_all_are_told(served: Serve) -> None:
    class Fails(Callback):
        def on_log(self, replica: int, step: int, values: Any, run: Any) -> None:
            raise ValueError("it is the callback's")

    server = served("replicas=1..2", callbacks=[Fails()])

    def trains() -> None:
        with server.joined() as (worker, model, optimizer):
            worker.log({"loss": 1.0})
            steps(model, optimizer, lambda: False)

    with pytest.raises(WorkerError, match=r"the server at .* has failed: .*on_log"):
        trains()
    with pytest.raises(CallbackError, match="it is the callback's"):
        server.run()


def test_ctrl_c_at_a_process_ends_it_alone(served: Serve, script: Callable[[str], Script]) -> None:
    server = served("replicas=1..2 aggregation=synchronous")
    with server.joined() as (_, model, optimizer):
        other = script("interrupted")
        steps(model, optimizer, lambda: other.process.poll() is not None)
        assert other.ended()[0] == 0
    assert server.run().left == []


def test_ctrl_c_at_the_server_ends_all_with_a_run(script: Callable[[str], Script], tmp_path: Path) -> None:
    server = script("serve")
    eventually((tmp_path / "run" / "server.json").exists)
    model, optimizer = start()
    with paceline.join(model=model, optimizer=optimizer, address=tmp_path / "run"):
        steps(model, optimizer, lambda: True)
        server.process.send_signal(signal.SIGINT)
        steps(model, optimizer, lambda: False)  # until training ends, which ends the loop and nothing else
    status, out, err = server.ended()
    assert status == 0, err
    updates, *rest = out.split()
    assert rest == ["True", "SIGINT"]
    run = paceline.load(tmp_path / "run")
    assert (run.summary["updates"], run.summary["interrupted"]) == (int(updates), True)
    for name, tensor in state_of(model).items():
        torch.testing.assert_close(tensor, run.state[name], rtol=0.0, atol=0.0)
    assert not (tmp_path / "run" / "server.json").exists()
    assert "serving program at 127.0.0.1:" in err


def test_ctrl_c_before_anybody_has_joined(script: Callable[[str], Script], tmp_path: Path) -> None:
    server = script("serve")
    eventually((tmp_path / "run" / "server.json").exists)
    server.process.send_signal(signal.SIGINT)
    status, out, err = server.ended()
    assert (status, out) == (0, "0 True SIGINT\n"), err


def test_a_server_that_is_killed_ends_those_that_have_joined(script: Callable[[str], Script], tmp_path: Path) -> None:
    server = script("serve")
    eventually((tmp_path / "run" / "server.json").exists)
    model, optimizer = start()
    before = torch.optim.SGD.step

    def trains() -> None:
        with paceline.join(model=model, optimizer=optimizer, address=tmp_path / "run"):
            steps(model, optimizer, lambda: True)
            server.process.kill()
            steps(model, optimizer, lambda: False)

    with pytest.raises(WorkerError, match=r"the server at 127\.0\.0\.1:\d+ is gone"):
        trains()
    assert optimizer.step.__func__ is before, "the script has its own optimizer again"  # type: ignore[attr-defined]
    server.ended()
    model, optimizer = start()
    with (
        pytest.raises(InputError, match="no server answers at"),
        paceline.join(model=model, optimizer=optimizer, address=tmp_path / "run"),
    ):
        pass


def test_a_server_that_is_stopped_is_given_up(script: Callable[[str], Script], tmp_path: Path) -> None:
    server = script("serve")
    eventually((tmp_path / "run" / "server.json").exists)
    model, optimizer = start()

    def trains() -> None:
        with paceline.join(model=model, optimizer=optimizer, address=tmp_path / "run", timeout_s=2.0):
            steps(model, optimizer, lambda: True)
            server.process.send_signal(signal.SIGSTOP)
            steps(model, optimizer, lambda: False)

    with pytest.raises(WorkerError, match=r"the server at .* has not answered for 2 s"):
        trains()


def test_who_is_silent_for_too_long_is_told_that_the_others_have_gone_on(served: Serve) -> None:
    server = served("replicas=1..2 aggregation=synchronous", suspect_after_s=2.0)

    def silent_script(model: Any, optimizer: Any) -> None:
        with server.joined() as (_, silent, never):
            for each in (model, silent):
                gradient_step(each, BATCH)
            beside(optimizer.step, never.step)  # so that their pace is known
            steps(model, optimizer, lambda: len(rows(server.out)) == 1)
            steps(silent, never, lambda: False)

    with server.joined() as (_, model, optimizer):
        gradient_step(model, BATCH)
        with pytest.raises(WorkerError, match=r"has gone on without this process: silent for [\d.]+ s"):
            silent_script(model, optimizer)
    [exit] = server.run().left
    assert exit.replica == 1
    assert exit.reason.startswith("silent for")


# ------------------------------------------------------------------------------------------------------- refusals


def refused(server: Served, match: str, model: Any = None, optimizer: Any = None, **given: Any) -> None:
    if model is None:
        model, optimizer = start()
    with (
        pytest.raises(InputError, match=match),
        paceline.join(model=model, optimizer=optimizer, **{"address": server.out} | given),
    ):
        raise AssertionError("it has joined")


def test_what_differs_is_named_and_the_server_goes_on(served: Serve) -> None:
    server = served("replicas=1..2")

    def model(*layers: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.Sequential(*layers).double()

    nn, sgd = torch.nn, torch.optim.SGD
    wide = model(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 3))
    refused(
        server,
        r"0\.weight is float64 \[16, 8\] in the server, but float64 \[17, 8\] in this process",
        wide,
        sgd(wide.parameters(), lr=0.3, momentum=0.9),
    )
    single = model(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).float()
    refused(
        server,
        r"float64 \[16, 8\] in the server, but float32",
        single,
        sgd(single.parameters(), lr=0.3, momentum=0.9),
    )
    same, _ = start()
    refused(server, "lr of the optimizer is 0.3 in the server, but 0.1 in", same, sgd(same.parameters(), 0.1, 0.9))
    refused(server, "optimizer is SGD in the server, but Adam in", same, torch.optim.Adam(same.parameters(), lr=0.3))
    program = paceline.Program(model=lambda: same, optimizer=lambda p: sgd(p, 0.3, 0.9), clip_norm=1.0)
    with (
        pytest.raises(InputError, match=r"clip_norm=1\.0\), but the server has clip_norm=None"),
        paceline.join(program, address=server.out),
    ):
        pass
    with server.joined() as (worker, _, _):
        assert worker.replica == 0
    assert server.run().left == []


def test_another_version_is_refused(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served("replicas=1..2")
    monkeypatch.setattr(paceline, "__version__", "0.0.9")
    refused(server, r"version of Paceline is 0\.1\.0 in the server, but 0\.0\.9 in this process")
    monkeypatch.undo()
    with server.joined():
        pass
    server.run()


def test_a_full_server_names_its_bound(served: Serve) -> None:
    server = served("replicas=1..2")
    with server.joined(), server.joined():
        refused(server, r"replicas=1\.\.2: 2 processes have joined already.*replicas=1\.\.3")
    server.run()


def test_a_wrong_token_is_refused(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served("replicas=1..2")
    port = json.loads((server.out / "server.json").read_text())["port"]
    address = f"127.0.0.1:{port}"
    refused(server, r"needs the server's token in the environment; write PACELINE_TOKEN=", address=address)
    monkeypatch.setenv("PACELINE_TOKEN", "short")
    refused(server, "which can be guessed", address=address)
    monkeypatch.setenv("PACELINE_TOKEN", "not the token that it has")
    refused(server, "does not take the token of the variable PACELINE_TOKEN", address=address)
    monkeypatch.delenv("PACELINE_TOKEN")
    with server.joined():
        pass
    server.run()


def test_what_comes_from_a_connection_is_never_unpickled_and_ends_that_alone(served: Serve, tmp_path: Path) -> None:
    """Somebody who knows the token sends a pickle, as to another host, or calls what is no call."""
    server = served("replicas=1..2")
    told = json.loads((server.out / "server.json").read_text())
    address = StreamAddress(told["host"], told["port"], told["token"].encode(), "")

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    from paceline.engine.server.calls import JSON, SocketPeer
    from paceline.engine.server.peer import PeerError, PeerLostError

    pickling = SocketPeer(address, {"joins": True})
    with pytest.raises(PeerLostError):
        pickling.begin("alive", Evil()).result(10.0)
    for name, *words in (("__init__",), ("__setattr__", "ended", None), ("_host",), ("caller",), ("nothing",)):
        with pytest.raises(PeerError, match="is no call" if name.startswith("_") else "callable|nothing"):
            SocketPeer(address, {"joins": True}, codec=JSON).begin(name, *words).result(10.0)
    asking = SocketPeer(address, {"joins": True}, codec=JSON)
    for call in (("close",), ("scale", 5), ("done", 0, 0, [0, 0, 0, 0], []), ("lost", 0, 0, "gone")):
        with pytest.raises(PeerError, match="is no call of this replica"):
            asking.begin("ask", *call).result(10.0)
    for hello in ([], 5, {"memory": {"size_bytes": 1}}, {"memory": 7}):
        with contextlib.suppress(OSError, EOFError), wire.connect(address, hello) as connection:
            connection.settimeout(10.0)
            connection.sendall(b"\xff" * 4096)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert not (tmp_path / "executed").exists()
    with server.joined() as (_, model, optimizer):
        steps(model, optimizer, lambda: True)
    assert server.run().summary["updates"] == 3


def test_a_gradient_that_is_not_finite_ends_the_run_and_all_are_told(served: Serve) -> None:
    server = served("replicas=1..2")

    def script() -> None:
        with server.joined() as (_, model, optimizer):
            gradient_step(model, BATCH)
            next(model.parameters()).grad.fill_(float("nan"))
            optimizer.step()
            steps(model, optimizer, lambda: False)

    with pytest.raises(WorkerError, match=r"the server at .* has failed: the Δ of replica 0 at its step 1 is not fin"):
        script()
    with pytest.raises(NonFiniteError):
        server.run()
    assert not (server.out / "server.json").exists()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"strategy": "replicas=4"}, r"write replicas=1\.\.4, or replicas=4\.\.4"),
        ({"strategy": "replicas=1..4 stages=2"}, "leave stages out"),
        ({"strategy": "replicas=1..4 shards=2"}, "leave shards out"),
        ({"strategy": "replicas=1..4 device=cuda"}, "leave device out"),
        ({"strategy": "replicas=1..4 servers=2"}, "leave servers out"),
        ({"strategy": "replicas=1..4 standby=1"}, "leave standby out"),
        ({"strategy": "replicas=1..4 aggregation=hogwild"}, "write aggregation=asynchronous"),
        ({"strategy": "auto"}, "nobody knows who will join"),
        ({"address": "localhost"}, "is not HOST:PORT"),
        ({"address": "192.0.2.1:0"}, "can't be listened at"),
        ({"engine": "ray"}, "leave engine out"),
        ({"on_death": "stop"}, "leave on_death out"),
        ({"model": None}, "serve needs what is trained"),
        ({"out": None}, "write out='runs/a', or set the environment variable PACELINE_TOKEN"),
    ],
)
def test_what_a_server_can_not_do_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], match: str
) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    model, optimizer = start()
    with pytest.raises(InputError, match=match):
        paceline.serve(**{"model": model, "optimizer": optimizer, "out": tmp_path / "run"} | given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"strategy": "replicas=2"}, "that is for the server to say"),
        ({"clip_norm": 1.0}, "that is for the server to say"),
        ({"engine": "distributed:gloo"}, "that is for the server to say"),
        ({"steps": 5}, "that is for the server to say"),
        ({"address": "nowhere"}, "no server is under way there"),
        ({"address": "a:b"}, "is not HOST:PORT"),
    ],
)
def test_what_a_process_can_not_say_is_refused(given: dict[str, Any], match: str) -> None:
    model, optimizer = start()
    with (
        pytest.raises(InputError, match=match),
        paceline.join(**{"model": model, "optimizer": optimizer, "address": "127.0.0.1:1"} | given),
    ):
        pass
