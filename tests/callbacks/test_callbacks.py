"""What each callback does, and what is refused."""

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
import paceline.run
from paceline import CallbackError, InputError, callbacks, compare, launch, share_workers, train
from paceline.callbacks import EarlyStopping, JsonLines, MLflow, RunHandle, TensorBoard, WandB
from paceline.callbacks.dispatch import Callbacks
from paceline.core.records import Record, ReplicaExit
from paceline.engine.base import Logged, Watcher
from tests.callbacks.recording import Recording, assert_whole
from tests.engine import programs

QUIET: dict[str, Any] = {"engine": "virtual", "progress": False}


def program() -> Any:
    return programs.program(test=programs.data(samples=20))


def record(number: int, loss: float | None = 1.0, **more: Any) -> Record:
    return Record(float(number), number, number, 1, None, None, test_loss=loss, **more)


def handle(history: list[Record] | None = None) -> RunHandle:
    return RunHandle("program", "replicas=1", "virtual", None, history or [])


def after(stopping: EarlyStopping, losses: list[float | None], history: list[Record] | None = None) -> list[int]:
    """Numbers of the records at which it has asked for the end."""
    run, found = handle(history), list[int]()
    stopping.on_start(run)
    for number, loss in enumerate(losses):
        run.stopped = None
        stopping.on_record(record(number, loss), run)
        if run.stopped is not None:
            found.append(number)
    return found


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (EarlyStopping(), r"callbacks=EarlyStopping\(…\) is one callback; write callbacks=\[EarlyStopping\(…\)\]"),
        ([EarlyStopping], r"has a class; write callbacks=\[EarlyStopping\(…\)\]"),
        ([print], r"has no Callback; write class Mine\(paceline.callbacks.Callback\)"),
        ("early", r"is no list; write callbacks=\[paceline.callbacks.EarlyStopping\(\)\]"),
    ],
)
def test_what_is_no_callback_is_refused(given: Any, instead: str) -> None:
    with pytest.raises(InputError, match=instead):
        train(program(), steps=1, callbacks=given, **QUIET)
    with pytest.raises(InputError, match=instead):
        compare(program(), ["replicas=1"], steps=1, callbacks=given, **QUIET)


class Misspelt(callbacks.Callback):
    def on_reccord(self, record: Record, run: RunHandle) -> None:
        run.stop("never called")


def test_a_method_that_nothing_calls_is_refused() -> None:
    said = r"unknown method of the callback Misspelt 'on_reccord'; did you mean 'on_record'\?"
    with pytest.raises(InputError, match=said):
        train(program(), steps=1, callbacks=[Misspelt()], **QUIET)


def test_jobs_on_shared_workers_have_none() -> None:
    with pytest.raises(InputError, match=r"write train\(…, callbacks=…\) for one job"):
        share_workers({"a": program()}, engine="virtual", steps=1, callbacks=[Recording()])


@pytest.mark.parametrize("reason", ["", 7, "x" * 1001])
def test_a_reason_is_a_text(reason: Any) -> None:
    with pytest.raises(InputError, match=r"write run\.stop"):
        handle().stop(reason)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"patience": 0}, "write patience=1"),
        ({"min_delta": -1.0}, "write min_delta=0"),
        ({"field": "test_bleu"}, "write mode='min' or mode='max'"),
        ({"mode": "best"}, "unknown mode 'best'"),
    ],
)
def test_early_stopping_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        EarlyStopping(**options)


@pytest.mark.parametrize(("make", "package"), [(WandB, "wandb"), (MLflow, "mlflow"), (TensorBoard, "tensorboard")])
def test_a_package_that_is_absent_is_named(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.run, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=rf"needs {package}, .* run: pip install 'paceline\[{package}\]'"):
        make(*(["events"] if package == "tensorboard" else []))


# ------------------------------------------------------------------------------------------------------------- dispatch


def test_they_are_called_in_turn_with_one_handle() -> None:
    one, other = Recording(), Recording()
    calling = Callbacks([one, other], handle(), lambda: True)
    watch = Watcher(take=calling.take, asked=calling.stopped)
    calling.start()
    watch.event(record(1))
    watch.event(Logged(1, 7, {"norm": 0.5}))
    watch.event(ReplicaExit(1, "left", 2.0))
    assert (watch.stopped, one.handle) == (None, other.handle)
    one.handle.stop("enough")
    assert watch.stopped == "enough"
    calling.end(None)
    calling.end(None)
    assert one.calls == other.calls
    assert one.calls[1:] == [
        ("record", record(1)),
        ("log", (1, 7, {"norm": 0.5})),
        ("departure", ReplicaExit(1, "left", 2.0)),
        ("end", None),
    ]


def test_an_error_names_the_callback_and_ends_those_that_have_begun() -> None:
    one, failing, late = Recording(), Recording(fails="start"), Recording()
    calling = Callbacks([one, failing, late], handle(), lambda: True)
    with pytest.raises(CallbackError, match=r"callback Recording\.on_start failed: KeyError: 'torn'"):
        calling.start()
    calling.end(None)
    assert (one.names(), failing.names(), late.names()) == (["start", "end"], ["start", "end"], [])


def test_a_process_that_calls_none_knows_the_history() -> None:
    active, recording = [False], Recording()
    calling = Callbacks([recording], handle(), lambda: active[0])
    calling.start()
    calling.take(record(1))
    assert recording.calls == []
    active[0] = True  # the first rank has died
    calling.take(Logged(0, 1, {}))
    assert recording.names() == ["start", "log"]
    assert recording.handle.history == [record(1)]


def test_launch_and_resume_take_them(tmp_path: Path) -> None:
    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)

    first, second = Recording(stop_after=2), Recording()
    settings = {"checkpoint": tmp_path / "ckpt", "evaluate_every": 2}
    run = launch(loop, program(), steps=6, callbacks=[first], **settings, **QUIET)
    assert_whole(first, run)
    again = paceline.resume(tmp_path / "ckpt", program(), steps=6, evaluate_every=2, callbacks=[second], progress=False)
    assert [each.updates for each in run.history] == [0, 2]
    assert [each.updates for each in again.history] == [0, 2, 4, 6]
    assert [each.updates for each in second.of("record")] == [4, 6]


def test_compare_calls_them_for_each_run() -> None:
    stopping = Recording(stop_after=2)
    compared = compare(program(), ["replicas=1", "replicas=2"], steps=6, callbacks=[stopping], **QUIET)
    assert (
        stopping.names()
        == ["start", "record", "record", "end", "start", *4 * ["record"], "end"][:4] + stopping.names()[4:]
    )
    assert stopping.names().count("start") == stopping.names().count("end") == 2
    assert len(compared.runs) == 2


# ------------------------------------------------------------------------------------------------------- early stopping


def test_early_stopping_counts_records_without_an_improvement() -> None:
    assert after(EarlyStopping(patience=2), [0.9, 0.7, 0.8, 0.7, 0.6]) == [3]
    assert after(EarlyStopping(patience=2), [0.9, 0.8, 0.7, 0.6]) == []
    assert after(EarlyStopping(patience=2, mode="max"), [0.9, 0.8, 0.95, 0.9, 0.9]) == [4]
    assert after(EarlyStopping(patience=1, min_delta=0.1), [0.9, 0.85]) == [1]
    assert after(EarlyStopping(patience=2), [1.0, math.nan, math.inf]) == [2], "no improvement"
    assert after(EarlyStopping(patience=2), [1.0, None, None, None]) == [], "not scored"


def test_early_stopping_goes_on_with_the_records_before_a_resume() -> None:
    assert after(EarlyStopping(patience=2), [0.8], [record(0, 0.5), record(1, 0.7)]) == [0]
    stopping = EarlyStopping(patience=2)
    assert after(stopping, [0.5, 0.6, 0.7]) == after(stopping, [0.5, 0.6, 0.7]) == [2], "each run anew"


def test_early_stopping_ends_a_run() -> None:
    run = train(program(), steps=400, evaluate_every=4, callbacks=[EarlyStopping("test_loss", patience=3)], **QUIET)
    best = min(run.history, key=lambda each: each.test_loss or math.inf)
    assert run.history.index(best) == len(run.history) - 4
    assert run.summary["stopped"] == f"test_loss has not improved on {best.test_loss:g} for 3 records"


def test_early_stopping_names_the_fields_that_there_are() -> None:
    with pytest.raises(InputError, match=r"unknown history field in EarlyStopping 'test_los'.*'test_loss'"):
        train(program(), steps=4, callbacks=[EarlyStopping("test_los", mode="min"), EarlyStopping()], **QUIET)
    with pytest.raises(InputError, match=r"unknown history field in EarlyStopping 'test_loss'.*'train_loss'"):
        train(programs.program(), steps=4, callbacks=[EarlyStopping()], **QUIET)


# ---------------------------------------------------------------------------------------------------------------- files


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_are_there_at_once(tmp_path: Path) -> None:
    path, seen = tmp_path / "new" / "lines.jsonl", list[int]()

    class Reads(callbacks.Callback):
        def on_record(self, record: Record, run: RunHandle) -> None:
            seen.append(len(lines(path)))

    settings = {"checkpoint": tmp_path / "ckpt", "steps": 6, "evaluate_every": 2}
    run = train(program(), callbacks=[JsonLines(path), Reads()], **settings, **QUIET)
    rows = lines(path)
    assert seen == [2, 3, 4, 5]
    assert [row["event"] for row in rows] == ["start", *4 * ["record"], "checkpoint", "end"]
    written = [{k: v for k, v in row.items() if k not in ("event", "at")} for row in rows if row["event"] == "record"]
    assert written == run.results()["history"]
    assert rows[5]["path"] == str(tmp_path / "ckpt" / "step-6")
    assert (rows[0]["strategy"], rows[-1]["failed"]) == (str(run.strategy), False)
    with pytest.raises(CallbackError):
        train(program(), steps=4, callbacks=[JsonLines(path), Recording(fails="record")], **QUIET)
    assert lines(path)[: len(rows)] == rows, "what is in it stays"
    assert lines(path)[-1]["failed"] is True


def test_json_lines_have_what_a_loop_logs_and_no_nan(tmp_path: Path) -> None:
    writer, run = JsonLines(tmp_path / "a"), handle()
    writer.on_start(run)
    writer.on_log(1, 3, {"norm": 0.5, "bad": math.nan}, run)
    writer.on_departure(ReplicaExit(1, "left", 2.0), run)
    writer.on_end(None)
    logged, departed = lines(tmp_path / "a")[1:3]
    assert (logged["replica"], logged["step"], logged["values"]) == (1, 3, {"norm": 0.5, "bad": None})
    assert (departed["replica"], departed["reason"], departed["time_s"]) == (1, "left", 2.0)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    seen = list[int]()

    class Reads(callbacks.Callback):
        def on_record(self, record: Record, run: RunHandle) -> None:
            seen.append(len(scalars(tmp_path / "tb")["test_loss"]))

    board = TensorBoard(tmp_path / "tb")
    train(program(), steps=4, evaluate_every=2, callbacks=[board, Reads()], **QUIET)
    assert seen == [1, 2, 3]
    board.on_start(handle())
    board.on_log(1, 7, {"norm": 0.5}, handle())
    board.on_end(None)
    assert scalars(tmp_path / "tb")["norm/replica 1"] == [(7, 0.5)]


def test_the_option_writes_beside_the_run_while_it_lasts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    seen = list[int]()

    class Reads(callbacks.Callback):
        def on_record(self, record: Record, run: RunHandle) -> None:
            assert run.out is not None
            seen.append(len(scalars(run.out)["test_loss"]))

    out = tmp_path / "run"
    run = train(program(), steps=4, evaluate_every=2, out=out, tensorboard=True, callbacks=[Reads()], **QUIET)
    assert seen == [1, 2, 3]
    expected = [(each.updates, pytest.approx(each.test_loss, rel=1e-6)) for each in run.history]  # of float32
    assert scalars(out)["test_loss"] == expected
    assert paceline.load(out).history == run.history, "the events are in the manifest"
    assert not (out / "progress.jsonl").exists()
    with pytest.raises(CallbackError):
        train(program(), steps=4, out=tmp_path / "b", tensorboard=True, callbacks=[Recording(fails="record")], **QUIET)
    assert not (tmp_path / "b").exists()


# ------------------------------------------------------------------------------------------------------------- services


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a file of wandb: after seven bytes the log format of LevelDB, in blocks of 32 KiB."""
    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if 32768 - at % 32768 < 7 or kind == 0:
            at += 32768 - at % 32768
            continue
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run there, offline, read back from the file that a later ``wandb sync`` sends."""
    wandb = pytest.importorskip("wandb", reason="needs wandb: pip install 'paceline[wandb]'")
    from wandb.proto import wandb_internal_pb2

    class Logs(callbacks.Callback):
        def on_record(self, record: Record, run: RunHandle) -> None:
            logging.on_log(1, record.updates + 1, {"norm": 0.5}, run)

    monkeypatch.setenv("WANDB_SILENT", "true")
    logging = WandB(mode="offline", dir=str(tmp_path), project="paceline", config={"mine": 1})
    stopping = Recording(stop_after=2)
    run = train(program(), steps=6, evaluate_every=2, callbacks=[logging, Logs(), stopping], **QUIET)
    wandb.teardown()  # its process, which writes the file, has ended then
    rows, configured = list[dict[str, Any]](), dict[str, str]()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    for content in wandb_records(path):
        message = wandb_internal_pb2.Record()
        message.ParseFromString(content)
        if message.HasField("history"):
            items = message.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        if message.HasField("run"):
            configured |= {item.key: json.loads(item.value_json) for item in message.run.config.update}
    records = [row for row in rows if "test_loss" in row]
    assert [(row["updates"], row["test_loss"]) for row in records] == [(r.updates, r.test_loss) for r in run.history]
    assert [(row["step"], row["norm/replica 1"]) for row in rows if "step" in row] == [(1, 0.5), (3, 0.5)]
    assert (configured["strategy"], configured["mine"]) == (str(run.strategy), 1)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run there, in a store of files."""
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install 'paceline[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # 3.17 refuses a store of files otherwise
    uri = (tmp_path / "store").as_uri()
    logging, recording = MLflow("tried", tracking_uri=uri, run_name="mine"), Recording(stop_after=2)
    run = train(program(), steps=6, evaluate_every=2, callbacks=[logging, recording], **QUIET)
    client = mlflow.MlflowClient(tracking_uri=uri)
    assert logging.run_id is not None
    found = client.get_run(logging.run_id)
    assert (found.info.status, found.info.run_name, found.data.tags["stopped"]) == ("FINISHED", "mine", "enough")
    assert found.data.params == {"program": "program", "strategy": str(run.strategy), "engine": "virtual"}
    losses = client.get_metric_history(logging.run_id, "test_loss")
    assert [(m.step, m.value) for m in losses] == [(each.updates, each.test_loss) for each in run.history]
    logging.on_log(1, 7, {"norm: a": 0.5}, handle())
    assert client.get_metric_history(logging.run_id, "norm_ a/replica 1")[0].step == 7
    with pytest.raises(CallbackError):
        train(program(), steps=4, callbacks=[logging, Recording(fails="record")], **QUIET)
    assert client.get_run(logging.run_id).info.status == "FAILED"


def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: JsonLines, event: str, **values: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(JsonLines, "write", full)
    run = train(program(), steps=4, out=tmp_path / "run", **QUIET)
    assert paceline.load(tmp_path / "run").history == run.history
