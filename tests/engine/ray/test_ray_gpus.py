"""What Ray is asked for where workers compute on GPUs; no Ray is started."""

import pytest
import torch

from paceline import device

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

from paceline.engine.ray.actor_pool import gpus_of_worker, worker_options

UNITS = 10_000
"""Ray counts in parts of 10^-4, and leaves out what is less."""


@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.parametrize("workers", range(1, 40))
def test_all_workers_have_room(workers: int, gpus: int) -> None:
    """Each on one GPU, which none shares with more than if all GPUs had equally many."""
    each = gpus_of_worker("cuda", workers, gpus)
    assert 0 < each <= 1
    on_one = UNITS // int(each * UNITS)
    assert on_one * gpus >= workers
    assert on_one == -(-workers // gpus)


@pytest.mark.parametrize(("kind", "gpus"), [("cpu", 4), ("cpu", 0), ("mps", 0)])
def test_none_is_asked_for_where_there_is_none_to_reserve(kind: str, gpus: int) -> None:
    assert gpus_of_worker(kind, 3, gpus) == 0.0
    options = worker_options("ab" * 28, 0.0)
    assert options["num_gpus"] == options["num_cpus"] == 0
    assert options["scheduling_strategy"].node_id == "ab" * 28


def test_which_node_has_a_gpu_is_left_to_ray() -> None:
    options = worker_options("ab" * 28, 0.5)
    assert options["num_gpus"] == 0.5
    assert options["scheduling_strategy"] == "SPREAD"


def test_a_worker_that_sees_one_gpu_has_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "count", lambda kind: 1)
    assert [device.of_worker("cuda", number) for number in range(3)] == [torch.device("cuda", 0)] * 3
