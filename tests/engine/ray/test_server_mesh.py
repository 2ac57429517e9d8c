"""Sums over the slices of A: the same bits at all servers, whoever of two with a slice is there."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.engine.server.messages import Member
from paceline.engine.server.run_control import ServerLostError
from paceline.engine.server.server_mesh import ServerMesh

TIMEOUT_S = 30.0

FIRST, OTHER, STANDBY = Member(0), Member(1), Member(1, standby=True)


@pytest.fixture
def meshes() -> Iterator[dict[Member, ServerMesh]]:
    """Two servers, and the standby of the second."""
    found = {member: ServerMesh(2, member, TIMEOUT_S) for member in (FIRST, OTHER, STANDBY)}
    for one, other in ((FIRST, OTHER), (FIRST, STANDBY), (OTHER, STANDBY)):
        ends = socket.socketpair()
        found[one].add(other, ends[0])
        found[other].add(one, ends[1])
    with contextlib.ExitStack() as closing:
        for mesh in found.values():
            closing.callback(mesh.close)
        yield found


def together(meshes: dict[Member, ServerMesh], values: dict[Member, list[float]]) -> dict[Member, list[float]]:
    """Have servers add up at the same time; return what each has found."""
    found = dict[Member, list[float]]()

    def add_up(member: Member) -> None:
        found[member] = meshes[member].summed(values[member])

    threads = [threading.Thread(target=add_up, args=(member,)) for member in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return found


def test_all_have_the_same_sums(meshes: dict[Member, ServerMesh]) -> None:
    for step in range(3):
        theirs = [0.1 * step, 2.0]
        found = together(meshes, {FIRST: [0.7, 1.0], OTHER: theirs, STANDBY: theirs})
        assert [*found.values()] == [[0.7 + 0.1 * step, 3.0]] * 3


def test_one_that_is_ahead_has_left_its_numbers(meshes: dict[Member, ServerMesh]) -> None:
    """The standby of the second adds up twice with the first one's numbers before the second does at all."""
    for step in (1.0, 2.0):
        assert [*together(meshes, {FIRST: [step], STANDBY: [10.0]}).values()] == [[10.0 + step]] * 2
    assert meshes[OTHER].summed([10.0]) == [11.0]
    assert meshes[OTHER].summed([10.0]) == [12.0]


@pytest.mark.parametrize("dead", [OTHER, STANDBY])
def test_of_two_with_a_slice_either_does(meshes: dict[Member, ServerMesh], dead: Member) -> None:
    meshes[dead].close()
    found = together(meshes, {FIRST: [1.0], dead.other: [2.0]})
    assert found == {FIRST: [3.0], dead.other: [3.0]}


def test_a_slice_that_nobody_has_is_named_at_once(meshes: dict[Member, ServerMesh]) -> None:
    for dead in (OTHER, STANDBY):
        meshes[dead].close()
    meshes[FIRST].why = lambda member: f"{member.label} said so"
    with pytest.raises(ServerLostError, match=r"server 1 died, and its slice of A with it: .*server 1 said so"):
        meshes[FIRST].summed([1.0])


def test_who_does_not_answer_is_named(meshes: dict[Member, ServerMesh]) -> None:
    meshes[FIRST]._timeout_s = 0.05
    with pytest.raises(ServerLostError, match=r"server 1 has not answered for 0\.05 s"):
        meshes[FIRST].summed([1.0])
