"""Own loops on Ray's actors: equal to the plain torch loop; what they log comes to main, where they ask to end, too."""

import pytest

from paceline import InputError, Program, WorkerError, launch
from paceline.engine.ray.engine import RayEngine
from tests.engine import own_loops
from tests.engine.own_loops import (
    GAN_OPTIMIZERS,
    SGD,
    Gan,
    LogKeeper,
    equal,
    gan_loop,
    loop,
    make_model,
    reporting_loop,
)

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")


@pytest.mark.parametrize("replicas", [1, 2])
def test_equals_the_plain_loop(engine: RayEngine, replicas: int) -> None:
    program = Program(model=make_model, optimizer=SGD)
    run = launch(loop, program, f"replicas={replicas}", engine=engine, progress=False)
    equal(run.state, own_loops.plain(SGD))


def test_several_optimizers_equal_the_plain_loop(engine: RayEngine) -> None:
    program = Program(model=Gan, optimizer=GAN_OPTIMIZERS)
    equal(launch(gan_loop, program, "replicas=2", engine=engine, progress=False).state, own_loops.plain_gan())


def test_several_servers_refuse_what_only_one_would_know(engine: RayEngine) -> None:
    with pytest.raises((InputError, WorkerError), match="servers=1"):
        launch(gan_loop, Program(model=Gan, optimizer=GAN_OPTIMIZERS), "replicas=2 servers=2", engine=engine)
    with pytest.raises((InputError, WorkerError), match="servers=1"):
        launch(loop, Program(model=make_model, optimizer=SGD), "replicas=2 servers=2", engine=engine, progress=False)


def test_what_loops_say_comes_to_main(engine: RayEngine) -> None:
    kept_logs = LogKeeper()
    settings = {"steps": 100_000, "callbacks": [kept_logs], "progress": False}
    run = launch(reporting_loop, own_loops.program(), "replicas=2 aggregation=asynchronous", engine=engine, **settings)
    assert run.summary["stopped"] == "five are enough"
    for replica in (0, 1):
        steps = [step for own, step, _ in kept_logs.logged if own == replica]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= 5 * replica  # the other goes its own pace
