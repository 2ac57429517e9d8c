"""The drawing of a mesh says where ranks are and who talks with whom: as the engine has it, nothing else."""

import itertools
import json
import re
from typing import Any, cast

import pytest

from paceline import InputError, Strategy, show_mesh
from paceline.api.mesh_drawing import MeshDrawing, draw_mesh
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.p2p import Routes
from paceline.engine.spmd.rank_context import SubGroups

MESHES = [
    "replicas=2 stages=2 shards=2",
    "replicas=3 stages=2 shards=[2,1]",
    "replicas=2 stages=3 shards=[1,3,2]",
    "replicas=2 stages=[3,1] shards=[1,2]",
    "stages=[2,1] shards=2",
    "replicas=4",
    "shards=3",
    "stages=4",
    "replicas=1",
]


class Remembers:
    """Stands in for a run's communicator."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []

    def split(self, groups: list[list[int]]) -> None:
        """Of which ranks there would be groups."""
        self.asked.append(groups)


def ranks(drawing: MeshDrawing, kind: str) -> set[tuple[int, ...]]:
    return {group.ranks for group in drawing.groups if group.kind == kind}


@pytest.mark.parametrize("strategy", MESHES)
def test_groups_are_those_that_the_engine_makes(strategy: str) -> None:
    mesh, drawing, engine = Strategy.parse(strategy).mesh, draw_mesh(strategy), Remembers()
    SubGroups.of(mesh, cast(Communicator, engine))
    for kind, made in zip(("shards", "copies", "peers"), engine.asked, strict=True):
        assert ranks(drawing, kind) == {tuple(circle) for circle in made if len(circle) > 1}, kind
    sent = {
        (rank, to)
        for rank in range(mesh.workers)
        for number, column in enumerate(mesh.stage_replicas)
        if column.stage == mesh.coordinate(rank).stage + 1
        for to in Routes(mesh, mesh.coordinate(rank)).to(number)
    }
    assert ranks(drawing, "stages") == sent


@pytest.mark.parametrize("strategy", MESHES)
def test_each_rank_stands_once_where_the_mesh_has_it(strategy: str) -> None:
    mesh = Strategy.parse(strategy).mesh
    rows = [line.split("  ", 1) for line in show_mesh(strategy).splitlines() if line.startswith("stage ")]
    assert [name for name, _ in rows] == [f"stage {stage}" for stage in range(len(mesh.stage_workers))]
    found = [[int(rank) for rank in re.findall(r"\d+", cells)] for _, cells in rows]
    assert sorted(itertools.chain(*found)) == list(range(mesh.workers))
    for stage, ranks_ in enumerate(found):
        assert [mesh.coordinate(rank).stage for rank in ranks_] == [stage] * len(ranks_)
        assert [mesh.coordinate(rank).replica for rank in ranks_] == sorted(
            mesh.coordinate(rank).replica for rank in ranks_
        )


def test_those_who_take_turns_are_apart_in_the_drawing() -> None:
    shown = show_mesh("stages=[2,1] shards=2")
    assert "stage 0  0 1 + 2 3" in shown
    assert "+ is between workers that take turns at a stage" in shown
    assert re.search(r"copies of a stage +once a step +0-2 1-3 ", shown)


def test_as_many_hosts_as_replicas_keep_all_but_peers_inside() -> None:
    shown = show_mesh("replicas=2 stages=2 shards=2", hosts=2)
    assert "4 of 4 between hosts" in shown
    assert shown.count("each inside a host") == 2
    assert not draw_mesh("replicas=2 stages=2 shards=2", hosts=2).warnings


def test_shards_on_several_hosts_are_warned_of_with_the_line_to_write() -> None:
    made = draw_mesh("replicas=2 shards=4", hosts=[6, 2])
    [said] = made.warnings
    assert said == (
        "warning: the shards of replica 1, stage 0 (ranks 4-5-6-7) are on hosts 0 and 1: every operator that is "
        "divided waits for the network between them; write shards=2 or fewer"
    )
    assert str(made).splitlines()[-1] == said
    assert "4 5 | 6 7" in str(made)
    assert "start 2 ranks on each host" in draw_mesh("replicas=3 shards=2", hosts=[3, 3]).warnings[0]


def test_no_hosts() -> None:
    with pytest.raises(InputError, match="hosts=0 are none; write hosts=1, or more"):
        draw_mesh("replicas=4", hosts=0)


def test_torchrun_says_which_ranks_are_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert draw_mesh("replicas=2 stages=2 shards=2").hosts == (range(4), range(4, 8))
    with pytest.raises(InputError, match=re.escape("= 4 workers, but hosts=[4, 4] have 8; write as many")):
        show_mesh("replicas=4")


def test_replicas_at_their_own_pace_meet_in_a_and_have_no_peers() -> None:
    shown = show_mesh("replicas=2 stages=2 aggregation=asynchronous")
    assert "peers of a part" not in shown
    assert re.search(r"each replica and A +when its policy lets it +in shared memory", shown)


def test_on_ray_a_replica_is_on_one_host_and_meets_a_with_the_server() -> None:
    shown = show_mesh("replicas=3 stages=2 shards=2", 2, engine="ray")
    assert re.search(r"replica 0  replica 1  replica 2\n +host 0     host 1     host 0\n", shown)
    assert re.search(r"each replica and A +once a step +in shared memory on the server's host, else over TCP", shown)
    assert "peers of a part" not in shown
    assert "|" not in shown
    uneven = draw_mesh("replicas=3 shards=2 aggregation=asynchronous", [2, 6], engine="ray:auto")
    assert uneven.hosts == ([4, 5], [0, 1, 2, 3])
    assert re.search(r"each replica and A +when its policy lets it ", str(uneven))
    assert draw_mesh("shards=4", engine="ray").hosts == ([0, 1, 2, 3],)


@pytest.mark.parametrize("hosts", [0, [4, 0], []])
def test_on_ray_each_host_has_cores(hosts: Any) -> None:
    with pytest.raises(InputError, match=re.escape(f"hosts={hosts} are none, or one has no core")):
        show_mesh("replicas=2 shards=2", hosts, engine="ray")


def test_json_is_plain_and_complete() -> None:
    read: Any = json.loads(json.dumps(draw_mesh("replicas=2 stages=2 shards=2", hosts=2).to_json()))
    assert read["hosts"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    fifth = read["ranks"][5]
    assert (fifth["host"], fifth["replica"], fifth["stage"], fifth["shard"]) == (1, 1, 0, 1)
    assert {"kind": "peers", "name": "stage 0, shard 1", "ranks": [1, 5], "hosts": [0, 1]} in read["groups"]


@pytest.mark.parametrize("hosts", [0, 3, [4, 5], [8, 0], []])
def test_hosts_that_do_not_fit_are_refused(hosts: Any) -> None:
    with pytest.raises(InputError, match="hosts="):
        show_mesh("replicas=2 stages=2 shards=2", hosts)
