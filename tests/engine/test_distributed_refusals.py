"""What the distributed engine refuses before it meets anybody."""

from typing import Any

import pytest

from paceline import InputError
from paceline.api.train import check
from paceline.engine.spmd.launch_env import LaunchEnv, backend_for
from tests.engine import programs


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts the third of four processes, two on each host."""
    for name, value in {"RANK": 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))


def refused(match: str, strategy: str, engine: str = "distributed", **settings: Any) -> None:
    with pytest.raises(InputError, match=match):
        check(programs.program(), strategy, engine=engine, **{"steps": 1} | settings)


def test_what_torchrun_says(four: None) -> None:
    assert LaunchEnv.current() == LaunchEnv(rank=2, size=4, local_size=2, one_host=False)
    check(programs.program(), "replicas=4", engine="distributed", steps=1)


def test_who_was_started_alone() -> None:
    assert LaunchEnv.current() == LaunchEnv(rank=0, size=1, local_size=1)
    check(programs.program(), "replicas=1", engine="distributed", steps=1)


def test_more_or_fewer_processes_than_workers(four: None) -> None:
    refused(
        "replicas=2 × stages=1 × shards=1 = 2 workers, but 4 were started by torchrun; write replicas=4 or start 2",
        "replicas=2",
    )


def test_replicas_that_write_one_a(four: None) -> None:
    refused(
        "aggregation=hogwild writes memory that replicas share, but .* write engine=local",
        "replicas=4 aggregation=hogwild",
    )


def test_servers_where_every_rank_has_a(four: None) -> None:
    refused("servers=2 have a slice of A each, but .* every rank has A; leave servers out", "replicas=4 servers=2")


def test_more_servers_than_ranks(four: None) -> None:
    refused(
        "servers=5 are in as many ranks, but the strategy has 4 workers; write servers=4",
        "replicas=4 servers=5 aggregation=asynchronous",
    )


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("shard_parameters=true compression=bf16", "shard_parameters=True sums .* leave one of them out"),
        ("shard_optimizer=true compression=bf16", "shard_optimizer=True sends .* leave one of them out"),
    ],
)
def test_what_does_not_go_together(four: None, words: str, match: str) -> None:
    refused(match, f"replicas=4 {words}")


def test_times_are_for_virtual_time(four: None) -> None:
    refused("engine=distributed runs in real time; write engine='virtual'", "replicas=4", times="compute=1")


@pytest.mark.parametrize(("local", "backend"), [("4", "shm"), ("2", "gloo"), (None, "gloo")])
def test_only_who_knows_that_all_are_on_its_host_takes_to_shared_memory(
    four: None, monkeypatch: pytest.MonkeyPatch, local: str | None, backend: str
) -> None:
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert backend_for("cpu", None, LaunchEnv.current()) == backend
