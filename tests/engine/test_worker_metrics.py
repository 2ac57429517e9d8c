"""``workers.json``: which processes a run has, for as long as it lasts."""

import json
from pathlib import Path

from paceline.core.mesh import Coordinate
from paceline.engine.worker_metrics import remove_workers_file, workers_file


def test_it_is_there_while_the_run_lasts(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    others = {"coordinator": {"pid": 7}, "scorer": {"pid": 13}}
    with workers_file(folder, others, {Coordinate(0): {"pid": 11}, Coordinate(1): {"pid": 12}}) as files:
        rows = json.loads((folder / "workers.json").read_text())
        assert folder / "workers.json" in files
    assert [(row["role"], row["pid"]) for row in rows] == [
        ("coordinator", 7), ("scorer", 13), ("replica", 11), ("replica", 12)
    ]  # fmt: skip
    assert rows[2] == {"role": "replica", "replica": 0, "stage": 0, "shard": 0, "pid": 11}
    assert not folder.exists()


def test_a_node_is_named_where_there_are_several(tmp_path: Path) -> None:
    with workers_file(tmp_path, {}, {Coordinate(3): {"pid": 11, "node": "b"}}):
        [row] = json.loads((tmp_path / "workers.json").read_text())
    assert (row["replica"], row["pid"], row["node"]) == (3, 11, "b")


def test_a_run_without_a_folder_writes_nothing(tmp_path: Path) -> None:
    with workers_file(None, {"coordinator": {"pid": 7}}, {}) as files:
        assert not files


def test_taking_it_away_keeps_what_is_not_ours(tmp_path: Path) -> None:
    with workers_file(tmp_path, {"scorer": {"pid": 1}}, {}):
        (tmp_path / "mine").touch()
        (tmp_path / ".workers.json.partial").touch()  # main was killed while it wrote
        remove_workers_file(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
