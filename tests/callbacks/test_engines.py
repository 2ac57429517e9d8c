"""Callbacks on every engine: which are called, in which order, and how they end training."""

import functools
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import CallbackError, Run, callbacks, train
from paceline.comm.fork_server import ForkServer
from paceline.core.records import Record
from tests import ranks
from tests.callbacks.recording import Recording, assert_ended, assert_whole
from tests.engine import programs
from tests.engine.distributed_cases import kept
from tests.ranks import Play

SCRIPT = Path(__file__).with_name("callbacks_script.py")

MANY = 10**6
"""Steps that no test waits for: what ends before has been ended."""

STRATEGIES = [
    "replicas=2",
    "replicas=2 aggregation=asynchronous",
    "replicas=2 aggregation=hogwild",
    "replicas=2 aggregation=local-steps:period=2",
    "replicas=2 stages=2",
    "replicas=1 stages=2 schedule=pipedream micro_batches=1",
    "replicas=2 shards=2 aggregation=asynchronous",
]
VIRTUAL = [text for text in STRATEGIES if "hogwild" not in text and "stages" not in text and "shards" not in text]

Local = Callable[..., Run]


@pytest.fixture
def local(engine: Any) -> Local:
    """Train on the engine that all tests share."""
    return functools.partial(train, engine=engine, progress=False)


def program(**fields: Any) -> Any:
    return programs.program(test=programs.data(samples=20), **fields)


def dying(worker: Any) -> None:
    """Replica 1 dies at its third step."""
    for made, batch in enumerate(worker.batches()):
        if worker.replica == 1 and made == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step(batch)


@pytest.mark.parametrize("strategy", VIRTUAL)
def test_virtual(strategy: str) -> None:
    whole, stopping = Recording(), Recording(stop_after=3)
    run = train(program(), strategy, engine="virtual", steps=8, evaluate_every=2, callbacks=[whole], progress=False)
    assert_whole(whole, run)
    assert "stopped" not in run.summary
    stopped = train(program(), strategy, engine="virtual", steps=MANY, evaluate_every=2, callbacks=[stopping])
    assert_whole(stopping, stopped)
    assert stopped.history == run.history[:3], "A is evaluated already where it ends"
    assert (stopped.summary["stopped"], stopped.summary["interrupted"]) == ("enough", False)


def test_events_that_the_option_asks_for_come_while_replicas_train_in_lockstep(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    board, seen = callbacks.TensorBoard, list[int]()

    def on_record(self: callbacks.TensorBoard, record: Record, run: callbacks.RunHandle) -> None:
        seen.append(record.updates)
        assert len(seen) < 3, "enough"

    monkeypatch.setattr(board, "on_record", on_record)
    with pytest.raises(CallbackError, match="enough"):
        local(program(), "replicas=2 stages=2", steps=MANY, evaluate_every=2, out=tmp_path / "a", tensorboard=True)


def test_virtual_seconds_end_with_the_record() -> None:
    settings: dict[str, Any] = {"engine": "virtual", "times": "compute=0.01", "evaluate_every": 0.1, "progress": False}
    run = train(program(), "replicas=2", seconds=10, callbacks=[Recording(stop_after=3)], **settings)
    assert (len(run.history), run.summary["seconds"]) == (3, pytest.approx(0.2))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_local(local: Local, strategy: str) -> None:
    whole, stopping = Recording(), Recording(stop_after=3)
    run = local(program(), strategy, steps=8, evaluate_every=2, callbacks=[whole])
    assert_whole(whole, run)
    assert "stopped" not in run.summary
    # Elsewhere than under a simulated clock replicas go on until the third record is there.
    stopped = local(program(), strategy, steps=MANY, evaluate_every=50, callbacks=[stopping])
    assert_ended(stopping, stopped, MANY)


@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=2 stages=2"])
def test_a_run_that_is_stopped_at_its_start_has_what_it_starts_from(local: Local, strategy: str) -> None:
    recording = Recording(stop_at="start")
    run = local(program(), strategy, steps=MANY, evaluate_every=MANY, callbacks=[recording])
    assert_whole(recording, run)
    assert run.history[0].updates == 0
    assert run.summary["stopped"] == "enough"


def test_a_replica_that_is_killed_departs_while_the_run_lasts(local: Local) -> None:
    recording = Recording()
    run = local(program(), "replicas=2", steps=20, on_death="continue", loop=dying, callbacks=[recording])
    assert_whole(recording, run)
    ((replica, reason),) = [(each.replica, each.reason) for each in recording.of("departure")]
    assert (replica, "SIGKILL" in reason) == (1, True)
    assert recording.names().index("departure") < len(recording.calls) - 2, "then comes the last record"


def test_a_departure_may_end_the_run(local: Local) -> None:
    recording = Recording(stop_at="departure")
    run = local(program(), "replicas=2", steps=MANY, evaluate_every=MANY, loop=dying, callbacks=[recording])
    assert_whole(recording, run)
    assert run.summary["stopped"] == "enough"


@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=2 stages=2"])
def test_checkpoints_are_named_once_they_are_whole(local: Local, tmp_path: Path, strategy: str) -> None:
    recording, saving = (
        Recording(stop_at="checkpoint"),
        {"checkpoint": tmp_path / "ckpt", "checkpoint_every": "5 steps"},
    )
    run = local(program(), strategy, steps=MANY, evaluate_every=MANY, callbacks=[recording], **saving)
    assert_whole(recording, run)
    assert run.summary["stopped"] == "enough"
    first, last = recording.of("checkpoint")[0], recording.of("checkpoint")[-1]
    assert first.parent == tmp_path / "ckpt"
    assert last.name == f"step-{run.summary['updates']}", "a run that is stopped is saved at its end"
    again = Recording()
    settings = {"steps": run.summary["steps"] + 4, "evaluate_every": 2, "resume": True, **saving}
    resumed = local(program(), strategy, callbacks=[again], **settings)
    before = again.of("start")[0][-1]
    assert before == len(resumed.history) - len(again.of("record")) > 0
    assert again.handle.history == resumed.history


@pytest.mark.parametrize("method", ["start", "record", "departure", "checkpoint"])
@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=2 stages=2"])
def test_what_a_callback_raises_ends_the_run_and_names_it(
    local: Local, tmp_path: Path, strategy: str, method: str
) -> None:
    if method == "departure" and "stages" in strategy:
        pytest.skip("ranks in lockstep end with the first that dies")
    failing, other = Recording(fails=method), Recording()
    settings: dict[str, Any] = {"loop": dying} if method == "departure" else {}
    with pytest.raises(CallbackError, match=rf"callback Recording.on_{method} failed: KeyError: 'torn'") as raised:
        local(
            program(), strategy, steps=MANY, evaluate_every=20, checkpoint=tmp_path / "ckpt",
            checkpoint_every="5 steps", out=tmp_path / "run", callbacks=[other, failing], **settings,
        )  # fmt: skip
    assert isinstance(raised.value.__cause__, KeyError)
    assert other.of("end") == failing.of("end") == [None]
    assert not (tmp_path / "run").exists()


def test_what_one_raises_at_the_end_loses_no_run(local: Local, capsys: pytest.CaptureFixture[str]) -> None:
    run = local(program(), "replicas=2", steps=4, callbacks=[Recording(fails="end"), after := Recording()])
    assert_whole(after, run)
    assert "callback Recording.on_end failed: KeyError: 'torn'; the run itself is over" in capsys.readouterr().err
    assert "on_end failed" in run.summary["callback_error"]


def test_under_torchrun_all_ranks_end_at_one_step(play: Play, tmp_path: Path) -> None:
    play(SCRIPT, "stopped", size=2, folder=tmp_path)
    for strategy in ("replicas=2", "replicas=1 stages=2", "replicas=2 aggregation=asynchronous"):
        (calls, run), (none, other) = kept(tmp_path, strategy, 2)
        assert none == [], "one rank has the callbacks"
        assert calls[0] == "start"
        assert calls[-1] == "end"
        assert calls.count("record") == len(run["history"]) >= 3
        assert run["summary"]["stopped"] == other["summary"]["stopped"] == "enough"
        assert run["summary"]["updates"] == other["summary"]["updates"] < MANY
        assert run["history"] == other["history"]
        if "asynchronous" not in strategy:  # a record, the step in which all are told, and the last record
            assert [row["updates"] for row in run["history"]] == [0, 4, 8, 9]


def test_under_torchrun_an_error_is_that_of_all_ranks(play: Play, tmp_path: Path) -> None:
    play(SCRIPT, "failing", size=2, folder=tmp_path)
    for strategy in ("replicas=2", "replicas=2 aggregation=asynchronous"):
        for error in kept(tmp_path, strategy, 2):
            assert error == ["CallbackError", "callback Recording.on_record failed: KeyError: 'torn'"]
    for error in kept(tmp_path, "different", 2):
        assert "whether there are callbacks" in error[1]


def test_the_rank_that_is_left_goes_on_with_its_callbacks(fork_server: ForkServer, tmp_path: Path) -> None:
    children = ranks.spawned(fork_server, SCRIPT, "survivor", size=2, folder=tmp_path)
    ended = ranks.statuses(fork_server, children)
    assert ended[1] == ranks.WELL, ranks.said(tmp_path, 1).read_text()
    names, history, departures = pickle.loads((tmp_path / "survivor.1").read_bytes())
    assert names[:2] == ["start", "departure"]
    assert names[-1] == "end"
    assert [departure.replica for departure in departures] == [0]
    assert history > names.count("record") > 0, "the handle knows of the records before"
