"""Jobs on shared workers: the bits of each, whose turn it is, shares that are killed and go on, and what is refused."""

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InputError, NonFiniteError, PacelineError, Program, Run, SharedRuns, load, share_workers, train
from paceline.api.job_turns import JobBudget, JobTurns, ranking
from paceline.core.conditions import Condition
from paceline.core.records import Record
from paceline.engine.local.engine import LocalEngine
from paceline.shared_runs import Slice, write_slices
from tests.engine import programs

MODULE = sys.modules[share_workers.__module__]
QUIET: dict[str, Any] = {"progress": False}
JOBS = {
    "slow": programs.program(optimizer=functools.partial(torch.optim.SGD, lr=0.001), test=programs.data()),
    "adam": programs.program(optimizer=functools.partial(torch.optim.Adam, lr=0.01), test=programs.data()),
    "other": programs.program(model=programs.dropout, seed=5, test=programs.data()),
}


class Killed(BaseException):
    """In place of SIGKILL: nothing catches it."""


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def share(jobs: Mapping[str, Program] = JOBS, strategy: str = "replicas=2", **options: Any) -> SharedRuns:
    return share_workers(jobs, strategy, **{"engine": "virtual", "slice_steps": 4} | options | QUIET)


def same(one: Run, other: Run) -> bool:
    assert one.state.keys() == other.state.keys()
    return all(torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())


# ------------------------------------------------------------------------------------------------------------ the bits


@pytest.mark.parametrize(
    ("strategy", "scheduler"),
    [("replicas=2", "priority"), ("replicas=2 aggregation=local-steps:period=2", "uniform"), ("stages=2", "cyclic")],
)
def test_each_job_ends_with_the_bits_of_the_job_alone(tmp_path: Path, strategy: str, scheduler: str) -> None:
    """10 steps in slices of 4, 4 and 2."""
    found = share(strategy=strategy, scheduler=scheduler, steps=10)
    assert found.ended == "all jobs have left"
    assert Counter(each.job for each in found.slices) == dict.fromkeys(JOBS, 3)
    for name, program in JOBS.items():
        alone = train(program, strategy, engine="virtual", steps=10, evaluate_every=4, **QUIET)
        assert same(found.runs[name], alone)
        # K apart: at the end of a slice it counts the replicas that are not done, as at the end of any run.
        ours, theirs = ([replace(r, threshold=0) for r in run.history] for run in (found.runs[name], alone))
        assert ours == theirs
        assert [each.steps for each in found.of(name)] == [4, 8, 10]
        assert sum(each.seconds for each in found.of(name)) == pytest.approx(alone.summary["seconds"], rel=1e-9)
    assert not list(tmp_path.iterdir()), "the temporary folder is gone"


def test_and_in_processes_on_one_engine(engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Any]()
    start = LocalEngine._fork_server_with

    def noted(engine: LocalEngine, *given: Any) -> Any:
        started.append(start(engine, *given))
        return started[-1]

    monkeypatch.setattr(LocalEngine, "_fork_server_with", noted)
    jobs = {name: JOBS[name] for name in ("slow", "adam")}
    found = share(jobs, engine=engine, steps=6, slice_steps=3, checkpoint=tmp_path / "ckpt")
    runs = [train(p, "replicas=2", engine=engine, steps=6, evaluate_every=3, **QUIET) for p in jobs.values()]
    assert len(started) == 2 * (4 + 2)  # each asks for it before its first step in main, and when it starts
    assert len(set(map(id, started))) == 1
    for name, alone in zip(jobs, runs, strict=True):
        assert same(found.runs[name], alone)
        # Times are those of this host, but the ends of slices have been evaluated.
        for ours, theirs in zip(found.runs[name].history, alone.history, strict=True):
            assert (ours.updates, ours.train_loss) == (theirs.updates, theirs.train_loss)
            assert (ours.test_loss, ours.test_accuracy) == (theirs.test_loss, theirs.test_accuracy)


# ----------------------------------------------------------------------------------------------------- whose turn it is


def record(loss: float | None, updates: int = 1) -> Record:
    return Record(0.0, updates, updates, 1, None, loss)


def turns(scheduler: str = "priority", jobs: int = 3, seed: int = 0, budget: JobBudget | None = None) -> JobTurns:
    names = [chr(ord("a") + k) for k in range(jobs)]
    return JobTurns(names, ranking(scheduler, jobs), "train_loss", 10, budget or JobBudget(1e9, None, {}, {}), seed)


def made(job: str, losses: tuple[float | None, ...], seconds: float = 1.0, steps: int = 10) -> Slice:
    return Slice(job, steps, seconds, tuple(map(record, losses)))


def first(drawn: JobTurns) -> str:
    turn = drawn.next()
    assert turn is not None
    return turn[0]


def test_jobs_without_a_slice_come_first() -> None:
    drawn = turns()
    seen = []
    for _ in range(3):
        seen.append(first(drawn))
        drawn.note(made(seen[-1], (100.0, 1.0)))
    assert sorted(seen) == ["a", "b", "c"]


def test_probability_is_decrease_per_second() -> None:
    """a: 1 in 2 s; b: 0.5 from its last slice on in 0.5 s, so 1; c has risen, and has η·mean as all have."""
    counts = Counter[str]()
    for seed in range(3000):
        drawn = turns("priority:eta=0.2", seed=seed)
        for each in (
            made("a", (3.0, 2.0), 2.0),
            made("c", (2.0, 9.0)),
            made("b", (50.0, 3.0)),
            made("b", (2.5,), 0.5, 20),
        ):
            drawn.note(each)
        counts[first(drawn)] += 1
    share_of_each = 0.2 * 0.75
    total = 1.5 + 3 * share_of_each
    for job, weight in (("a", 0.5), ("b", 1.0), ("c", 0.0)):
        # Standard deviation of a count of 3,000: at most 28; seeds are fixed.
        assert counts[job] == pytest.approx(3000 * (weight + share_of_each) / total, abs=90)


@pytest.mark.parametrize(("loss", "next_job"), [(None, "a"), (float("nan"), "b")])
def test_a_loss_that_was_not_evaluated_or_is_not_finite(loss: float | None, next_job: str) -> None:
    """The first as if the job had had no slice, the second as if it had not decreased."""
    drawn = turns("priority:eta=0.000001", jobs=2)
    drawn.note(made("b", (3.0, 2.0)))
    drawn.note(made("a", (3.0, loss)))
    assert first(drawn) == next_job


@pytest.mark.parametrize("scheduler", ["priority", "uniform", "cyclic"])
def test_who_has_left_is_not_drawn(scheduler: str) -> None:
    drawn = turns(scheduler, budget=JobBudget(None, 20, {}, {"b": Condition("train_loss", above=False, bound=1.0)}))
    steps = Counter[str]()
    while (turn := drawn.next()) is not None:
        job, total = turn
        drawn.note(made(job, (2.0, 0.9 if job == "b" else 1.5), steps=total))
        steps[job] = total
    assert steps == {"a": 20, "b": 10, "c": 20}
    assert drawn.ended() == "all jobs have left"
    assert drawn.fraction() == 1.0


def test_in_turn() -> None:
    drawn, order = turns("cyclic"), ""
    for _ in range(7):
        order += first(drawn)
        drawn.note(made(order[-1], (2.0, 1.0)))
    assert order == "abcabca"


def test_the_time_of_all_together_ends_it() -> None:
    found = share(seconds=0.1, scheduler="cyclic", times="compute=0.01 transfer=0 apply=0 gradient=0")
    assert [each.job for each in found.slices] == ["slow", "adam", "other"]  # of 0.04 s each
    assert found.ended == "0.1 s are over"
    assert found.seconds == pytest.approx(0.12, rel=1e-9)


def test_a_job_leaves_at_its_condition() -> None:
    found = share(steps=12, until={"adam": "train_loss<=1.07"}, evaluate_every=1)
    last = found.runs["adam"].history[-1]
    assert last.train_loss is not None
    assert last.train_loss <= 1.07
    assert found.of("adam")[-1].steps < 12 == found.of("slow")[-1].steps


def test_time_that_does_not_pass_is_named() -> None:
    with pytest.raises(PacelineError, match=r"has taken no time.*write\s+times='compute=0.01'"):
        share(steps=8, times="compute=0 transfer=0 apply=0 gradient=0")


# ------------------------------------------------------------------------------------------------- killed, and going on


@pytest.fixture(scope="module")
def whole() -> SharedRuns:
    return share(steps=8)


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kill where slices.json would be written for the n-th time; n is the list's one number."""
    left = [0]

    def write(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        write_slices(*args)

    monkeypatch.setattr(MODULE, "write_slices", write)
    return left


@pytest.mark.parametrize("after", [1, 2, 4, 7])
def test_a_killed_share_goes_on_as_if_it_had_not_been(
    tmp_path: Path, whole: SharedRuns, unwritten: list[int], after: int
) -> None:
    """Slices are noted after they were saved: the killed one is in the checkpoint, and not in slices.json."""
    unwritten[0] = after
    with pytest.raises(Killed):
        share(steps=8, checkpoint=tmp_path / "ckpt")
    found = share(steps=8, checkpoint=tmp_path / "ckpt", resume=True)
    assert [(each.job, each.steps) for each in found.slices] == [(each.job, each.steps) for each in whole.slices]
    for name in JOBS:
        assert same(found.runs[name], whole.runs[name])
        assert [r.updates for r in found.runs[name].history] == [r.updates for r in whole.runs[name].history]


def test_what_is_complete_is_returned_again_and_a_larger_budget_goes_on(tmp_path: Path, whole: SharedRuns) -> None:
    for steps, count in ((4, 3), (4, 3), (8, 6)):
        found = share(steps=steps, checkpoint=tmp_path / "ckpt", resume=True)
        assert len(found.slices) == count
    assert all(same(found.runs[name], whole.runs[name]) for name in JOBS)
    assert found.runs["adam"].history == whole.runs["adam"].history


def test_ctrl_c_keeps_what_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    made_runs = list[str]()

    def interrupted(program: Program, *args: Any, **options: Any) -> Run:
        if len(made_runs) == 2:
            raise KeyboardInterrupt
        made_runs.append(program.name)
        return train(program, *args, **options)

    monkeypatch.setattr(MODULE, "train", interrupted)
    found = share(steps=8)
    assert (found.interrupted, found.signal, len(found.slices), len(found.runs)) == (True, "SIGINT", 2, 2)
    assert "ended by SIGINT" in found.table()
    assert sorted(line.split()[1] for line in found.table().splitlines()[3:]) == ["0", "1", "1"]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_signal_ends_it_also_while_jobs_that_had_slices_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: SharedRuns, at: int
) -> None:
    """Three jobs are read, then slices go on; what the signal has cut short is not a slice yet, and is made later."""
    share(steps=4, checkpoint=tmp_path / "ckpt")
    calls = list[Run]()

    def interrupted(*args: Any, **options: Any) -> Run:
        calls.append(train(*args, **options))
        if len(calls) == at + 1:
            calls[-1].summary.update(interrupted=True, signal="SIGTERM")
        return calls[-1]

    with monkeypatch.context() as patched:
        patched.setattr(MODULE, "train", interrupted)
        found = share(steps=8, checkpoint=tmp_path / "ckpt", resume=True)
    assert (found.signal, len(found.slices), len(calls)) == ("SIGTERM", 3, max(3, at + 1))
    found = share(steps=8, checkpoint=tmp_path / "ckpt", resume=True)
    assert (found.signal, len(found.slices)) == (None, 6)
    assert all(same(found.runs[name], whole.runs[name]) for name in JOBS)


def test_a_slice_that_could_not_be_saved_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsaved(*args: Any, **options: Any) -> Run:
        run = train(*args, **options)
        run.summary["notes"].pop("checkpoint_updates")
        return run

    monkeypatch.setattr(MODULE, "train", unsaved)
    with pytest.raises(PacelineError, match="could not be saved in"):
        share(steps=8)


# ---------------------------------------------------------------------------------------------------- files, and tables


def test_slices_and_runs_are_saved(tmp_path: Path) -> None:
    found = share(steps=4, out=tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "slices.json").read_text("utf-8"))
    assert saved["jobs"] == list(JOBS)
    assert [each["job"] for each in saved["slices"]] == [each.job for each in found.slices]
    assert same(load(tmp_path / "out" / "1-adam", JOBS["adam"]), found.runs["adam"])
    lines = found.table().splitlines()
    assert lines[0].startswith("3 slices, ")
    assert [line.split()[0] for line in lines[2:]] == ["job", *JOBS]
    assert json.loads(json.dumps(found.to_json()))["jobs"].keys() == JOBS.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "job slow would never leave; write seconds=60"),
        ({"until": {"adam": "train_loss<=1"}}, "job slow would never leave"),
        ({"until": {"adm": "train_loss<=1"}, "steps": 8}, "unknown job in until= 'adm'; did you mean 'adam'"),
        ({"until": "train_loss", "steps": 8}, "and a number; write until="),
        ({"until": "test_los<=1", "steps": 8}, "test_los"),
        ({"steps": 0}, "steps=0, but it must be a whole number"),
        ({"seconds": -1}, "write seconds=60"),
        ({"slice_steps": 0, "steps": 8}, "slice_steps=0"),
        ({"seed": -1, "steps": 8}, "seed=-1"),
        ({"epochs": 1}, "write steps= for each job, or seconds="),
        ({"trace": True, "steps": 8}, "trace=True: spans would be those of a job's last slice"),
        ({"scheduler": "priorty", "steps": 8}, "did you mean 'priority'"),
        ({"scheduler": "priority:at_once=2", "steps": 8}, "leave at_once out"),
        ({"scheduler": 3, "steps": 8}, 'write scheduler="priority"'),
        ({"loss": "loss", "steps": 8}, "unknown loss 'loss'"),
        ({"loss": "test_loss", "steps": 8, "jobs": {"a": programs.program()}}, "job a has no test set"),
        ({"strategy": "auto", "steps": 8}, "write one for all jobs"),
        ({"engine": "distributed:gloo", "steps": 8}, "ranks under torchrun measure slices by clocks of their own"),
        ({"jobs": {}, "steps": 8}, "must be several programs"),
        ({"jobs": "digits", "steps": 8}, "must be several programs"),
        ({"jobs": {"a": 3}, "steps": 8}, "job 'a' is int, not a Program"),
        ({"jobs": {"": JOBS["adam"]}, "steps": 8}, "a job is called ''"),
        ({"jobs": [JOBS["adam"], JOBS["slow"]], "steps": 8}, "two programs are called 'program'"),
        ({"resume": True, "steps": 8}, "write checkpoint='ckpt' too"),
        ({"tensorboard": True, "steps": 8}, "write out='runs/a' too"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        share(options.pop("jobs", JOBS), **options)
    assert message in " ".join(str(refusal.value).split())


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(InputError, match="holds files that are not of jobs on shared workers"):
        share(steps=4, checkpoint=tmp_path / "other", resume=True)
    share(steps=4, checkpoint=tmp_path / "ckpt")
    with pytest.raises(InputError, match="write resume=True"):
        share(steps=4, checkpoint=tmp_path / "ckpt")
    with pytest.raises(InputError, match="is of the jobs slow, adam, other; write these, in this order"):
        share({"adam": JOBS["adam"]}, steps=4, checkpoint=tmp_path / "ckpt", resume=True)
    (tmp_path / "ckpt" / "slices.json").write_text('{"jobs": ["slow", "adam", "other"], "slices": [{}]}', "utf-8")
    with pytest.raises(InputError, match=r"slices\.json can't be read: has no 'job'"):
        share(steps=4, checkpoint=tmp_path / "ckpt", resume=True)


def test_a_job_that_diverges_is_named() -> None:
    inputs, targets = programs.data()
    jobs = {"tame": JOBS["slow"], "wild": programs.program(train=(inputs / 0, targets))}
    with pytest.raises(NonFiniteError, match="job wild: "):
        share(jobs, steps=8, scheduler="cyclic")


def test_the_page_s_program_gives_the_quick_job_more_turns(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[1] / "docs" / "parameter-scheduling.md"
    _, program = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert "seconds=3," in program
    torch.manual_seed(0)  # its data are random
    names: dict[str, Any] = {}
    exec(program.replace("seconds=3,", "seconds=6, engine='virtual', progress=False,"), names)
    assert len(names["shared"].of("quick")) > len(names["shared"].of("slow")) > 0
    assert capsys.readouterr().out.startswith(f"{len(names['shared'].slices)} slices, ")
