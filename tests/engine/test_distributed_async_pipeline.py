"""Pipelines whose weights move within a stream: as their formula says, as often as asked, and to a clean end."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline import InputError, NonFiniteError
from paceline.engine.base import Progress, Watcher
from paceline.engine.local.engine import LocalEngine
from paceline.schedule import parse
from tests import zoo
from tests.engine import programs
from tests.engine.distributed_cases import kept
from tests.engine.pipeline_cases import ADAM, Case
from tests.engine.streamed_cases import CASES, STEPS, expected, trained
from tests.engine.test_pipeline_failures import deep
from tests.engine.test_pipeline_parity import NORMALISED, ROUNDING, compare
from tests.ranks import Play, cases_of


@pytest.fixture(scope="module", params=[(2, "distributed:gloo"), (3, "distributed:shm")])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Play) -> tuple[int, Path]:
    """How many ranks were started, and where they left what they found."""
    ranks, engine = request.param
    folder: Path = tmp_path_factory.mktemp("ranks")
    play(Path(__file__).with_name("streamed_script.py"), engine, cases_of(request), size=ranks, folder=folder)
    return ranks, folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_process_that_keeps_all_versions(started: tuple[int, Path], name: str) -> None:
    """At the end of the stream all stages have had the same updates, on all ranks."""
    stages, folder = started
    bound = NORMALISED if CASES[name].program.optimizer is ADAM else ROUNDING
    for found, told, spans in kept(folder, name, stages):
        compare(found, expected(name, stages), bound)
        assert_told(told, stages, two="2bw" in CASES[name].strategy)
        assert {s.action for s in spans} >= {"forward", "backward", "apply"}


def assert_told(told: dict[str, Any], stages: int, *, two: bool) -> None:
    """Stage j uses weights p - 1 - j updates old (Narayanan et al. 2019), under 2BW all of them one (2020)."""
    oldest = 1 if two else stages - 1
    assert (told["steps"], told["updates"], told["applied"]) == (STEPS, STEPS, STEPS)
    assert told["staleness_max"] == oldest
    assert told["staleness"] == {str(s): 1 for s in range(oldest)} | {str(oldest): STEPS - oldest}
    by_stage = [1 if two else stages - 1 - j for j in range(stages)]
    assert told["notes"]["staleness_by_stage"] == ",".join(map(str, by_stage))
    assert not told["interrupted"]


# --------------------------------------------------------------------------------------------------- the local engine


@pytest.mark.parametrize("name", ["mlp", "masked"])
def test_the_local_engine_starts_the_stages_itself(engine: LocalEngine, name: str) -> None:
    found, told, _ = trained(name, 3, engine)
    compare(found, expected(name, 3), ROUNDING)
    assert_told(told, 3, two="2bw" in CASES[name].strategy)


def test_each_worker_does_what_the_schedule_says() -> None:
    """Also in flight: of forward passes that have had no backward, p - w at most."""
    _, _, spans = trained("mlp", 3, "local")
    kinds = {"forward": "forward", "backward": "backward", "update": "apply"}
    for worker in range(3):
        own = [(s.action, s.micro_batch) for s in spans if s.stage == worker and s.action in kinds.values()]
        own = [each for each in own if each[1] >= 0]
        order = [(kinds[a.kind], a.micro_batch) for a in parse("pipedream").actions(worker, 3, STEPS)]
        assert own == order


def program(**fields: Any) -> paceline.Program:
    return programs.program(model=deep, batch_size=8, **fields)


def run(engine: LocalEngine, words: str = "", made: paceline.Program | None = None, **settings: Any) -> paceline.Run:
    strategy = f"stages=3 schedule=pipedream {words}"
    return paceline.train(made or program(), strategy, engine=engine, progress=False, **settings)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_so_many_steps_as_asked(engine: LocalEngine, steps: int) -> None:
    summary = run(engine, steps=steps).summary
    assert (summary["steps"], summary["updates"], summary["gradients"]) == (steps, steps, steps)
    assert summary["discarded"] == 0


def test_so_many_passes_as_asked(engine: LocalEngine) -> None:
    """The last batch of each is smaller."""
    samples = len(program().train[1])
    batches = -(-samples // 8)
    found = run(engine, epochs=2)
    assert found.summary["updates"] == found.summary["steps"] == 2 * batches
    assert found.history[-1].updates == 2 * batches


@pytest.mark.parametrize("words", ["", "schedule=pipedream-2bw"])
def test_time_ends_a_run_at_the_same_step_everywhere(engine: LocalEngine, words: str) -> None:
    """What was made until that is heard of counts."""
    strategy = words or "schedule=pipedream"
    found = paceline.train(program(), f"stages=3 {strategy}", engine=engine, seconds=0.3, progress=False)
    summary = found.summary
    assert summary["updates"] == summary["applied"] == summary["gradients"] == summary["steps"] > 0
    assert summary["discarded"] == 0
    assert [record.updates for record in found.history] == sorted(record.updates for record in found.history)


def test_a_condition_ends_a_run(engine: LocalEngine) -> None:
    """It is met at the first score, of A_0; what has been begun by then is made."""
    found = run(engine, steps=40, evaluate_every=10, until="train_loss<=1000000")
    assert found.summary["updates"] < 40
    assert not found.summary["interrupted"]


def test_a_loop_may_end_before_the_budget(engine: LocalEngine) -> None:
    def short(worker: Any) -> None:
        for _, batch in zip(range(4), worker.batches(), strict=False):
            worker.step(batch)

    found = paceline.launch(short, program(), "stages=3 schedule=pipedream", engine=engine, steps=40, progress=False)
    assert found.summary["updates"] == 4


def test_ctrl_c_ends_a_run_with_what_there_is(engine: LocalEngine, watched: list[Watcher]) -> None:
    pressed: list[Progress] = []

    def watch(progress: Progress) -> None:
        if progress.phase == "training" and not pressed:
            pressed.append(progress)
            os.kill(os.getpid(), signal.SIGINT)

    watched.append(watch)
    found = paceline.train(program(), "stages=3 schedule=pipedream", engine=engine, steps=10**6)
    assert found.summary["interrupted"]
    assert found.summary["updates"] == found.summary["steps"] > 0


def spoilt(replica: int, replicas: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The fourth batch is no number."""
    del replica, replicas
    generator = torch.Generator().manual_seed(seed)
    for made in range(1, 200):
        size = torch.nan if made == 4 else 1.0
        yield size * torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.arange(8) % 3


@pytest.mark.parametrize("steps", [4, 20])
def test_what_is_not_finite_ends_the_run(engine: LocalEngine, steps: int) -> None:
    """Also where it comes last, and others hear of it when all is done."""
    with pytest.raises(NonFiniteError, match="at its step 4 is not finite"):
        run(engine, made=replace(program(), train=spoilt, test=None), steps=steps)


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "fields", "settings", "match"),
    [
        ("micro_batches=4", {}, {}, "micro_batches=4 of them are as many batches; write micro_batches=1"),
        ("", {"clip_norm": 0.5}, {}, "clip_norm=0.5 scales .* write clip_norm=None, or schedule=1f1b"),
        ("", {}, {"on_nonfinite": "skip"}, "on_nonfinite='skip' discards .* write on_nonfinite='stop'"),
        ("accumulate=2", {}, {}, "accumulate=2 makes one update of several batches.* write accumulate=1"),
        ("batchnorm=mini-batch", {}, {}, "batchnorm=mini-batch waits .* write batchnorm=micro-batch"),
    ],
)
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_what_needs_the_whole_gradient_first(
    engine: LocalEngine, schedule: str, words: str, fields: Any, settings: Any, match: str
) -> None:
    if "micro_batches" in words and schedule != "pipedream":
        words, match = "micro_batches=2", "micro_batches=2 is less than stages=3"
    with pytest.raises(InputError, match=match):
        paceline.train(
            program(**fields),
            f"stages=3 schedule={schedule} {words}",
            engine=engine,
            steps=1,
            progress=False,
            **settings,
        )


def test_weights_that_several_stages_hold(engine: LocalEngine) -> None:
    with pytest.raises(InputError, match=r"embedding.weight is on stages 0, 1, .* write schedule=1f1b"):
        Case(zoo.tied, "schedule=pipedream").run(2, engine)  # type: ignore[arg-type]
