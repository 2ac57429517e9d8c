"""Objects pickled into shared memory, and sent again and again over a channel."""

import linecache
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from comm_entries import Pipe
from comm_tensor_entries import Squares
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm.fork_server import ForkServer
from paceline.comm.shared_pickle import (
    LEAST_BYTES,
    SHARED_FROM_BYTES,
    ObjectReceiver,
    ObjectSender,
    object_of,
    parts_of,
    share,
    unpack,
)
from paceline.core.errors import InputError

LARGE = SHARED_FROM_BYTES // 4


def round_trip(obj: Any) -> Any:
    """Ship, unpack and let go of the parcel, as a receiver does."""
    parcel = share(obj)
    try:
        return unpack(parcel)
    finally:
        parcel.close()


def test_parts_are_the_arrays_themselves_each_of_them_once() -> None:
    large, small = np.arange(2.0 * LARGE), np.arange(8.0)
    stream, *arrays = parts_of({"large": large, "same": large, "small": small, "tensor": torch.from_numpy(large)})
    assert {len(part) for part in arrays} == {large.nbytes}
    assert len(stream) < 10_000
    got = pickle.loads(stream, buffers=arrays)
    large[5] = -1.0
    assert got["large"] is got["same"]
    assert got["large"][5] == got["tensor"][5] == -1.0
    assert got["small"].tolist() == small.tolist()


@pytest.mark.parametrize("size", [8, LARGE])
def test_views_share_their_storage_again(size: int) -> None:
    x = torch.arange(float(size))
    sent = {"x": x, "tail": x[4:], "pairs": x.view(2, -1).t(), "parameter": torch.nn.Parameter(x[:4])}
    got = round_trip(sent)
    for name, tensor in sent.items():
        assert torch.equal(got[name], tensor)
        assert got[name].stride() == tensor.stride()
        assert got[name].requires_grad == tensor.requires_grad
    assert isinstance(got["parameter"], torch.nn.Parameter)
    got["x"].zero_()
    assert not got["tail"].any()
    assert not got["pairs"].any()
    assert not got["parameter"].any()
    assert x.any()


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), st.permutations([0, 1, 2]), st.sampled_from(["float64", "int16", "bool"]))
def test_any_strided_view_arrives_as_it_is(start: int, step: int, order: list[int], dtype: str) -> None:
    base = torch.arange(32 * 32 * 33).remainder(7).to(getattr(torch, dtype)).view(32, 32, 33)
    view = base[start:, :, ::step].permute(order)
    got = round_trip((view, base))
    assert torch.equal(got[0], view)
    assert got[0].stride() == view.stride()
    assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()


@pytest.mark.parametrize("order", [1, -1])
def test_arrays_of_numpy_seen_as_tensors(order: int) -> None:
    array = np.arange(2.0 * LARGE)
    views = [torch.from_numpy(array), torch.from_numpy(array[:LARGE]), torch.from_numpy(array[3:])][::order]
    got = round_trip(views)
    assert all(torch.equal(a, b) for a, b in zip(got, views, strict=True))


def test_each_storage_is_stored_once() -> None:
    x = torch.zeros(10 * LARGE)
    parcel = share([x, x[1:], TensorDataset(x, x.view(-1, 1)), lambda: x])
    assert os.fstat(parcel.fd).st_size < 1.1 * x.nbytes
    parcel.close()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("writable", [True, False])
def test_numpy_keeps_order_and_protection(order: Any, writable: bool) -> None:
    array = np.asarray(np.random.default_rng(0).normal(size=(200, 300)), order=order)
    array.flags.writeable = writable
    got = round_trip(array)
    assert np.array_equal(got, array)
    assert got.flags.writeable == writable
    assert got.flags.f_contiguous == array.flags.f_contiguous


def test_lambdas_closures_and_classes_of_a_function_travel() -> None:
    scale = torch.full((LARGE,), 2.0)

    class Local(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * scale

    got = round_trip({"make": lambda n: torch.nn.Sequential(*(Local() for _ in range(n))), "scale": scale})
    assert torch.equal(got["make"](2)(torch.ones(LARGE)), scale**2)
    got["scale"].fill_(3.0)
    assert got["make"](1)(torch.ones(1))[0] == 3


def test_code_keeps_the_name_of_its_file() -> None:
    assert round_trip(lambda: 1).__code__.co_filename == __file__


def test_the_lines_of_a_notebooks_cell_go_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, source = "/nowhere/ipykernel_1/2.py", "def fails():\n    raise KeyError('of a cell')\n"
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, cell, "exec"), names)
    monkeypatch.setitem(linecache.cache, cell, (len(source), None, source.splitlines(keepends=True), cell))
    parts = parts_of(names["fails"])
    monkeypatch.delitem(linecache.cache, cell)
    fails = object_of(parts)
    assert (fails.__code__.co_filename, linecache.getline(cell, 2).strip()) == (cell, "raise KeyError('of a cell')")


def test_tied_weights_stay_tied_and_buffers_stay() -> None:
    first, second = torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)
    second.weight = first.weight
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(200), second).double()
    got = round_trip(model)
    assert got[0].weight is got[2].weight
    assert got.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(got.state_dict().values(), model.state_dict().values(), strict=True))


def test_data_sets_come_through_a_loader() -> None:
    for data in (Squares(2000), TensorDataset(torch.arange(20000.0).view(2000, 10), torch.arange(2000))):
        for (x, y), (x2, y2) in zip(DataLoader(data, 500), DataLoader(round_trip(data), 500), strict=True):
            assert torch.equal(x, x2)
            assert torch.equal(y, y2)


@pytest.mark.parametrize("empty", [torch.zeros(0), torch.zeros(3, 0), np.zeros((0, 2)), None, []])
def test_nothing_is_something_too(empty: Any) -> None:
    got = round_trip([empty])[0]
    assert getattr(got, "shape", None) == getattr(empty, "shape", None)


def test_receivers_share_the_pages_and_not_each_others_writes(fork_server: ForkServer, pipe: Pipe) -> None:
    offset = 40
    parcel = share({"x": torch.ones(1 << 20), "a": np.ones(1 << 19), "f": lambda n: n + offset})
    for _ in range(2):  # the second must not see what the first wrote
        fork_server.spawn("comm_tensor_entries:receive", {}, [pipe.fd, parcel.fd])
        said = pipe.read()
        assert said["total"] == (1 << 20) + (1 << 19)
        assert said["f"] == 42
        assert said["before"]["Anonymous"] == 0
        assert said["before"]["Rss"] >= 8 * 1024
        assert said["after"]["Anonymous"] >= 8 * 1024
    parcel.close()


def test_what_cannot_be_sent_is_named() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(InputError, match=r"dict can't be sent .*lock.*inside the functions"):
        share({"lock": threading.Lock()})
    assert os.listdir("/proc/self/fd") == before


def test_descriptors_go_with_the_last_view() -> None:
    before = os.listdir("/proc/self/fd")
    got = round_trip(torch.ones(LARGE))
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del got
    assert os.listdir("/proc/self/fd") == before


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    yield made
    for ends in made:
        for end in ends:
            end.close()


def test_all_have_each_letter_and_keep_it(pairs: list[Pair]) -> None:
    outbox, inboxes = ObjectSender(), [ObjectReceiver(theirs) for _, theirs in pairs]
    letters = [{"small": 1}, torch.arange(50_000.0), torch.arange(LEAST_BYTES / 4 + 1), torch.ones(20_000), "last"]
    found: list[list[object]] = []
    for letter in letters:
        assert outbox.post(letter, [mine for mine, _ in pairs]) == [True, True]
        found.append([inbox.collect() for inbox in inboxes])
    for letter, copies in zip(letters, found, strict=True):
        for copy in copies:
            assert torch.equal(copy, letter) if isinstance(letter, torch.Tensor) else copy == letter


def test_what_was_collected_may_be_written(pairs: list[Pair]) -> None:
    (mine, theirs), _ = pairs
    outbox, inbox, letter = ObjectSender(), ObjectReceiver(theirs), torch.ones(50_000)
    outbox.post(letter, [mine])
    inbox.collect().zero_()
    outbox.post(letter, [mine])
    assert torch.equal(inbox.collect(), letter)


def test_who_has_gone_is_told_apart(pairs: list[Pair]) -> None:
    pairs[0][1].close()
    assert ObjectSender().post(torch.ones(50_000), [mine for mine, _ in pairs]) == [False, True]
    pairs[1][0].close()
    inbox = ObjectReceiver(pairs[1][1])
    assert torch.equal(inbox.collect(), torch.ones(50_000)), "what was said before is heard"
    with pytest.raises(EOFError, match="has closed its end"):
        inbox.collect()


def test_nothing_stays_open(pairs: list[Pair]) -> None:
    before = os.listdir("/proc/self/fd")
    outbox, inbox = ObjectSender(), ObjectReceiver(pairs[0][1])
    for size in (50_000, LEAST_BYTES):
        outbox.post(torch.ones(size), [pairs[0][0]])
        inbox.collect()
    outbox.close()
    inbox.close()
    assert os.listdir("/proc/self/fd") == before
