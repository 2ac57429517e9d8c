"""A push and its reply by a stream: what arrives, who may send, and what becomes of a Δ whose replica goes on."""

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from paceline import Program, Run, Strategy, launch
from paceline.core.data_order import BatchRange
from paceline.core.errors import PacelineError
from paceline.engine.base import Budget, Job
from paceline.engine.run_context import RunContext
from paceline.engine.worker_metrics import Figures
from paceline.replica.flat_state import FlatLayout
from tests import oracle
from tests.engine import programs

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

from paceline.checkpoint.base import TensorChunk
from paceline.engine.own_states import OwnState
from paceline.engine.ray.engine import RayEngine
from paceline.engine.server import push_stream, server_link, wire
from paceline.engine.server.executor import ALONE, ServerExecutor
from paceline.engine.server.messages import (
    END,
    Bytes,
    PushCompletion,
    ReplicaAssignment,
    Reply,
    ServerGrant,
    arrays_of,
)
from paceline.engine.server.push_buffers import PushBuffers
from paceline.engine.server.push_client import CancelFlag, PushClient
from paceline.engine.server.push_stream import PushListener, PushStream
from paceline.engine.server.wire import Listener, StreamAddress
from paceline.engine.worker_metrics import InMemorySink
from paceline.replica.flat_slices import FlatSlice, slices_of

OnRay = Callable[..., Run]

PATIENCE_S = 30.0

OWN_BYTES = 1 << 14
"""Most of what a replica keeps."""


def completion(attempt: int) -> PushCompletion:
    return PushCompletion(3, 1, attempt, 7, 32, True, 0.25, Figures(1, 2**40, 3, 4))


def whole(layout: FlatLayout) -> FlatSlice:
    return slices_of(layout, 1, functools.partial(SGD, lr=0.1))[0]


def stream_to(address: StreamAddress, buffers: PushBuffers) -> PushStream:
    return PushStream(address, buffers, whole(buffers.sent.layout))


class Server:
    """A listener in a loop of a thread of its own, and what it was sent."""

    def __init__(self, layout: FlatLayout) -> None:
        self.loop = asyncio.new_event_loop()
        self.pushed: list[tuple[PushCompletion, list[Bytes], bool]] = []
        self.replies: list[Reply] = []
        self.pushes = PushListener(whole(layout), None, self._push, own_bytes=OWN_BYTES)
        self.listener = Listener("127.0.0.1", lambda connection, hello: self.pushes.serve(connection, hello["memory"]))
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

        async def address() -> StreamAddress:
            return self.listener.address()

        self.address = self.do(address())

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    async def _push(self, done: PushCompletion, refs: Sequence[Any], *arrays: Bytes, lent: bool) -> Reply:
        self.pushed.append((done, [array.copy() for array in arrays], lent))
        return self.replies.pop(0)

    def close(self) -> None:
        async def close() -> None:
            self.listener.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.wait(tasks) if tasks else None

        self.do(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()


def model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 3).double())


@pytest.fixture(params=[5, 200_000], ids=["small", "in many reads"])
def layout(request: pytest.FixtureRequest) -> FlatLayout:
    module = model(request.param)
    return FlatLayout.of(module, [name for name, _ in module.named_buffers()])


@pytest.fixture
def server(layout: FlatLayout) -> Iterator[Server]:
    found = Server(layout)
    yield found
    found.close()


@pytest.fixture
def buffers(layout: FlatLayout) -> Iterator[PushBuffers]:
    with contextlib.closing(PushBuffers(layout, own_bytes=OWN_BYTES)) as found:
        yield found


def parts(**tensors: Tensor) -> list[TensorChunk]:
    return [TensorChunk.whole(name, tensor) for name, tensor in tensors.items()]


def fill(vectors: list[Tensor], seed: int) -> list[Bytes]:
    """Fill vectors with random bits; return them as bytes."""
    generator = torch.Generator().manual_seed(seed)
    for vector in vectors:
        raw = vector.view(torch.uint8)
        raw.copy_(torch.randint(256, raw.shape, dtype=torch.uint8, generator=generator))
    return [vector.view(torch.uint8).numpy().copy() for vector in vectors]


@pytest.mark.parametrize("one_host", [True, False])
def test_what_is_sent_arrives_bit_for_bit(
    server: Server, layout: FlatLayout, buffers: PushBuffers, one_host: bool
) -> None:
    sent = layout.new()
    address = server.address if one_host else server.address._replace(host_id="another")
    stream = stream_to(address, buffers)
    for attempt in (1, 2, 3):
        pushed, returned = fill(buffers.delta.vectors, attempt), fill(sent.vectors, 10 * attempt)
        grant = ServerGrant(attempt + 1, BatchRange(2, 2**40, 5), 7 + attempt)
        server.replies = [(grant, arrays_of(sent))]
        stream.push(completion(attempt), cancelled=False)
        assert stream.receive() == grant
        assert [a.tobytes() for a in buffers.coming_arrays] == [a.tobytes() for a in returned]
        done, arrays, lent = server.pushed.pop()
        assert (done, lent) == (completion(attempt), one_host)
        assert [a.tobytes() for a in arrays] == [a.tobytes() for a in pushed]
    server.replies = [END]
    stream.push(completion(4), cancelled=True)
    assert stream.receive() is None
    assert server.pushed == [(completion(4), [], one_host)]
    stream.close()


@pytest.mark.parametrize("one_host", [True, False])
def test_of_one_version_a_comes_once(server: Server, layout: FlatLayout, buffers: PushBuffers, one_host: bool) -> None:
    """As under policies that have a replica compute several Δs of one A; a new stream begins with an A."""
    address = server.address if one_host else server.address._replace(host_id="another")
    for first in (1, 6):
        stream, kept = stream_to(address, buffers), []
        for attempt, version in enumerate((8, 8, 9, 9, 8), first):
            sent = layout.new()
            kept.append([a.tobytes() for a in fill(sent.vectors, attempt)])
            server.replies = [(ServerGrant(attempt + 1, BatchRange(0, 0, 1), version), arrays_of(sent))]
            stream.push(completion(attempt), cancelled=False)
            assert stream.receive() == ServerGrant(attempt + 1, BatchRange(0, 0, 1), version)
            newest = {0: 0, 1: 0, 2: 2, 3: 2, 4: 4}[attempt - first]
            assert [a.tobytes() for a in buffers.coming_arrays] == kept[newest]
        stream.close()


@pytest.mark.parametrize("one_host", [True, False])
def test_what_a_replica_keeps_comes_with_its_delta(server: Server, layout: FlatLayout, one_host: bool) -> None:
    """In one buffer after even attempts and in another after odd ones; more than fits is not told of."""
    values = torch.arange(1000, dtype=torch.float64)
    with contextlib.closing(PushBuffers(layout, own_bytes=OWN_BYTES)) as buffers:
        stream = stream_to(server.address if one_host else server.address._replace(host_id="another"), buffers)
        for attempt in (1, 2, 3):
            pushed = fill(buffers.delta.vectors, attempt)
            size = buffers.leave(attempt, OwnState({"steps": attempt}, parts(x=values * attempt, none=values[:0])))
            server.replies = [(ServerGrant(attempt + 1, BatchRange(0, 0, 1), 8), arrays_of(layout.new()))]
            stream.push(completion(attempt)._replace(own_bytes=size), cancelled=False)
            stream.receive()
            _, (*arrays, own), _ = server.pushed.pop()
            assert [a.tobytes() for a in arrays] == [a.tobytes() for a in pushed]
            read = OwnState.read(own.data)
            assert read.saved == {"steps": attempt}
            assert [part.name for part in read.parts] == ["x", "none"]
            assert torch.equal(read.parts[0].tensor, values * attempt)
            assert read.parts[1].tensor.shape == (0,)
        assert buffers.leave(4, OwnState({}, parts(x=values.repeat(10)))) == 0
        stream.push(completion(4)._replace(own_bytes=OWN_BYTES + 1), cancelled=True)
        with pytest.raises((EOFError, OSError)):
            stream.receive()
        stream.close()
    assert server.pushed == []


def test_a_replica_with_another_stream_is_answered_on_that_alone(
    layout: FlatLayout, server: Server, buffers: PushBuffers
) -> None:
    """What the server has not answered on the first one it must not write into the replica's memory later."""
    release = asyncio.Event()
    first, second = (stream_to(server.address, buffers) for _ in range(2))
    reply = ServerGrant(2, BatchRange(0, 0, 1), 1), arrays_of(layout.new())
    answered, took = server.pushes._push, threading.Event()

    async def waits(*args: Any, **named: Any) -> Reply:
        took.set()
        await release.wait()
        return await answered(*args, **named)

    server.pushes._push = waits
    first.push(completion(1), cancelled=False)
    assert took.wait(PATIENCE_S)
    server.pushes._push, server.replies = answered, [reply]
    second.push(completion(1), cancelled=False)
    assert second.receive() == reply[0]
    server.loop.call_soon_threadsafe(release.set)
    with pytest.raises(EOFError):
        first.receive()
    assert server.replies == []
    first.close()
    second.close()


# ------------------------------------------------------------------------------------------------------------ strangers


def connected(server: Server, *, local: bool = False) -> socket.socket:
    if not local:
        return socket.create_connection(server.address[:2], PATIENCE_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    connection.connect(f"\0{server.address.name}")
    return connection


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("answer", [b"", b"x", bytes(64), bytes(2000)])
def test_who_does_not_know_the_token_is_told_nothing(
    buffers: PushBuffers, server: Server, answer: bytes, local: bool
) -> None:
    with connected(server, local=local) as stranger, contextlib.suppress(ConnectionResetError):
        assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        stranger.sendall(answer)
        if len(answer) < 64:  # the server waits for the rest
            stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    assert server.pushed == []
    with pytest.raises(EOFError):
        stream_to(server.address._replace(token=bytes(32)), buffers)


def test_a_replica_does_not_send_to_who_does_not_know_the_token(buffers: PushBuffers, server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(64, socket.MSG_WAITALL)
                connection.sendall(bytes(32))
                connection.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        there = server.address._replace(port=other.getsockname()[1], name="")
        with pytest.raises(EOFError, match="another process listens"):
            stream_to(there, buffers)
        thread.join(PATIENCE_S)


def test_half_open_connections_are_closed_in_time(
    monkeypatch: pytest.MonkeyPatch, buffers: PushBuffers, server: Server
) -> None:
    monkeypatch.setattr(wire, "CONNECT_S", 0.2)
    monkeypatch.setattr(wire, "MOST_OPENING", 3)
    with contextlib.ExitStack() as held:
        strangers = [held.enter_context(connected(server)) for _ in range(8)]
        for stranger in strangers:
            stranger.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionResetError), stranger.makefile("rb") as told:
                assert len(told.read()) <= 32
    monkeypatch.setattr(wire, "CONNECT_S", PATIENCE_S)
    stream_to(server.address, buffers).close()


# --------------------------------------------------------------------------------------------------------------- on Ray


def test_streams_that_break_and_then_none_at_all(engine: RayEngine) -> None:
    """A push is made again of another stream, in the end by a call, and no Δ counts twice."""
    program = programs.program(optimizer=functools.partial(SGD, lr=0.1, momentum=0.9))
    steps = 4 + server_link.MOST_STREAMS
    assert steps <= 9, "one pass of the data and no more"
    run = launch(broken, program, "replicas=2", engine=engine, steps=steps, progress=False, evaluate_every=10**6)
    oracle.assert_same(run.model, oracle.one_process(program, 2, steps), 1e-12)  # as test_ray_parity
    assert run.summary["gradients"] == 2 * steps


def broken(worker: Any) -> None:
    for step, batch in enumerate(worker.batches()):
        stream = worker._client._link._stream
        assert (stream is None) == (step == 0 or step > server_link.MOST_STREAMS)
        if stream is not None:
            stream.break_off()
        worker.step(batch)


@pytest.mark.parametrize("width", [3, 3000])
def test_replicas_on_other_hosts_send_bytes(engine: RayEngine, width: int) -> None:
    program = programs.program(model=functools.partial(doubles, width), optimizer=functools.partial(SGD, lr=0.1))
    run = launch(elsewhere, program, "replicas=3", engine=engine, steps=4, progress=False, evaluate_every=10**6)
    oracle.assert_same(run.model, oracle.one_process(program, 3, 4), 1e-12)  # as test_ray_parity


def doubles(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()


def elsewhere(worker: Any) -> None:
    """The plain loop of a replica that shares no memory with the server."""
    host_id, push_stream.host_id = push_stream.host_id, lambda: "another host"
    try:
        for batch in worker.batches():
            worker.step(batch)
            assert not worker._client._link._stream._shared
    finally:
        push_stream.host_id = host_id


class Sums(nn.Module):
    """Its gradient is the mean of its inputs, whatever the parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean() + 0 * targets.sum()


def test_a_delta_that_waits_outlives_the_next_of_its_replica(on_ray: OnRay) -> None:
    """Integers and powers of two have no rounding, so the sum of all Δs has the same bits in every order."""
    inputs = torch.randint(-64, 64, (64, 4), generator=torch.Generator().manual_seed(5)).float()
    data, sgd = (inputs, torch.zeros(64)), functools.partial(SGD, lr=0.5)
    program = Program(model=Sums, loss=mean, optimizer=sgd, train=data, batch_size=4)
    run = on_ray(program, "replicas=2 aggregation=buffered:k=2,hold=false,combine=sum", steps=8)
    assert run.summary["applied"] == run.summary["gradients"] == 16
    assert run.summary["updates"] == 8
    assert torch.equal(run.model.weight, -0.5 * inputs.view(16, 4, 4).mean(1).sum(0))


def test_a_delta_in_a_replicas_memory_is_copied_when_that_goes_on_and_not_before() -> None:
    """A save that may read it ends first."""
    job = Job(programs.program(), Strategy(replicas=2), Budget("steps", 4, 4.0))
    executor, saves = ServerExecutor(RunContext(job), ALONE), list[int]()
    executor.before_change = lambda: saves.append(1)
    for replica in range(2):
        executor.lent[replica] = 1
        executor.undecided[replica, 1] = executor.owner.state.layout.new()
    waiting, going_on = executor.undecided[0, 1], executor.undecided[1, 1]
    values = fill(going_on.vectors, 5)
    executor.send(1, BatchRange(1, 0, 1))
    fill(going_on.vectors, 6)
    assert saves == [1]
    assert executor.undecided[0, 1] is waiting
    assert [array.tobytes() for array in arrays_of(executor.undecided[1, 1])] == [a.tobytes() for a in values]
    executor.send(1, BatchRange(1, 1, 1))
    assert saves == [1]


def test_where_a_server_can_not_listen_pushes_are_calls(buffers: PushBuffers, layout: FlatLayout) -> None:
    assert Listener("192.0.2.1", lambda *_: asyncio.sleep(0)).address() is None
    link = server_link.ServerLink(None, 0.0)
    link.call = lambda method: None  # type: ignore[method-assign]
    assert link.stream(buffers, whole(layout)) is None
    assert link._tries == 0


class OneReply:
    """Links to one server, which has answered a call with this A."""

    first = None

    def __init__(self, arrays: Sequence[Bytes]) -> None:
        self._arrays = arrays

    def begin_all(self, *_: Any) -> list[Any]:
        return []

    def results(self, _: Any) -> list[Reply]:
        return [(ServerGrant(1, BatchRange(0, 0, 1), 0), self._arrays)]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("offset", [0, 8])
def test_an_a_that_came_to_any_address_is_moved(layout: FlatLayout, offset: int) -> None:
    """A product of matrices is rounded by where they lie; so a replica has A where torch would have laid it."""
    expected = fill(layout.new().vectors, 1)
    arrays = [array_at(offset, array) for array in expected]
    client = PushClient(
        OneReply(arrays),  # type: ignore[arg-type]
        [whole(layout)],
        [None],
        ReplicaAssignment(0, 0, 0, 0, 0),
        0,
        PushBuffers(layout),
        CancelFlag(0),
        InMemorySink(),
        PATIENCE_S,
    )
    with contextlib.closing(client):
        assert client.wait_for_grant()
        state = client.pull()
        assert [array.tobytes() for array in arrays_of(state)] == [array.tobytes() for array in expected]
        assert {vector.data_ptr() % 64 for vector in state.vectors} == {0}
        where_it_came = [array.ctypes.data for array in arrays]
        assert ([vector.data_ptr() for vector in state.vectors] == where_it_came) == (offset == 0)
        del state


def array_at(offset: int, array: Bytes) -> Bytes:
    """Return a copy at an address so far from the start of a cache line."""
    room = np.empty(array.nbytes + 128, np.uint8)
    begin = -room.ctypes.data % 64 + offset
    copy = room[begin : begin + array.nbytes]
    copy[:] = array
    return copy


def test_memory_of_another_size_is_not_mapped(layout: FlatLayout) -> None:
    other = PushBuffers(FlatLayout.of(model(7)))
    with contextlib.closing(other), pytest.raises(PacelineError, match="were offered"):
        PushBuffers(layout, other.address)
