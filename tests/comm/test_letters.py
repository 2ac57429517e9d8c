"""What goes from one process to others and back: small and large, again and again."""

import os
import socket
from collections.abc import Iterator

import pytest
import torch

from paceline.comm.shared_pickle import LEAST_BYTES, ObjectReceiver, ObjectSender

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
    with pytest.raises(EOFError, match="has gone"):
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
