"""Replicas on Ray that say nothing, or are slow: named, and under ``on_death`` ended; a zombie's Δ is rejected."""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Run
from paceline.engine.base import Progress, Watcher
from paceline.engine.ray.engine import RayEngine
from tests.engine import programs
from tests.engine.local import moments
from tests.engine.local.test_on_death import same
from tests.engine.local.test_suspects import stop, stopping

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

STEPS = 8


def test_one_that_is_stopped_is_replaced(on_ray: OnRay, tmp_path: Path) -> None:
    loop = functools.partial(stopping, mark=tmp_path / "stopped", act=stop)
    settings: dict[str, Any] = {"steps": STEPS, "on_death": "replace", "suspect_after_s": 1.0}
    run = on_ray(programs.program(), "replicas=3", loop=loop, **settings)
    whole = on_ray(programs.program(), "replicas=3", **settings)
    assert same(whole, run)
    assert [exit_.replica for exit_ in run.left] == [1]
    assert run.left[0].reason.startswith("silent for ")
    assert "replica 1 silent for" in run.summary["notes"]["silent"]


def test_or_left_out(on_ray: OnRay, tmp_path: Path) -> None:
    loop = functools.partial(stopping, mark=tmp_path / "stopped", act=stop)
    run = on_ray(programs.program(), "replicas=3", steps=STEPS, loop=loop, on_death="continue", suspect_after_s=1.0)
    assert [exit_.replica for exit_ in run.left] == [1]
    assert run.summary["gradients"] == 3 * STEPS - STEPS // 2


def test_otherwise_it_is_named_and_waited_for(on_ray: OnRay, watched: list[Watcher], tmp_path: Path) -> None:
    """The display shows its name; then it is let go on."""
    pid = tmp_path / "pid"

    def stop_and_say_so() -> None:
        pid.write_text(str(os.getpid()))
        stop()

    def wake(progress: Progress) -> None:
        if any("replica 1 silent for" in remark for remark in progress.remarks):
            os.kill(int(pid.read_text()), signal.SIGCONT)

    watched.append(wake)
    loop = functools.partial(stopping, mark=tmp_path / "stopped", act=stop_and_say_so)
    run = on_ray(programs.program(), "replicas=2", steps=STEPS, loop=loop, suspect_after_s=1.0)
    assert run.left == []
    assert run.summary["gradients"] == 2 * STEPS
    assert "replica 1 silent for" in run.summary["notes"]["silent"]


def test_a_zombies_push_is_rejected(on_ray: OnRay, engine: RayEngine, tmp_path: Path) -> None:
    """What replica 1 pushes first, a push of an earlier actor is beside, with a Δ that would show in A."""
    loop = functools.partial(moments.loop, replica=1, step=3, prepare=functools.partial(pushing_twice, tmp_path))
    run = on_ray(moments.counting(), "replicas=3 aggregation=synchronous:combine=sum", epochs=2, loop=loop)
    assert (tmp_path / "rejected").exists()
    assert run.state["weight"].tolist() == [2.0] * moments.SAMPLES
    assert engine._pool is not None


def pushing_twice(folder: Path, worker: Any) -> None:
    """Push as another incarnation of this replica would, as the same attempt, and a second time what was pushed."""
    client, push = worker._client, worker._client.push
    replica, incarnation = client._replica

    def wrapped(measured: Any, **words: Any) -> None:
        (client._replica, bad), own = ((replica, incarnation - 1), client._buffers.delta), torch.full_like
        good = [vector.clone() for vector in bad.vectors]
        for vector in bad.vectors:
            vector.copy_(own(vector, 1000.0))
        push(measured)
        [(grant, arrays)] = client._links.results(client._pending)
        assert grant is None, "it was taken"
        assert not arrays
        for vector, value in zip(bad.vectors, good, strict=True):
            vector.copy_(value)
        client._replica = replica, incarnation
        push(measured, **words)
        client._link.drop_stream()
        push(measured, **words)  # as after a server that died before it answered
        client.push = push
        (folder / "rejected").touch()

    client.push = wrapped


def test_a_slow_one_is_named(on_ray: OnRay) -> None:
    run = on_ray(
        programs.program(), "replicas=3 aggregation=asynchronous", seconds=3, delay="fraction=0.4 constant:value=0.2"
    )
    assert "times as long for a step as the others" in run.summary["notes"]["stragglers"]
