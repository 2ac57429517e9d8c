"""share_workers: several programs take turns on the same workers, the one that learns fastest most often.

::

    scheduler -- a job --> train(steps = its steps so far + a slice, resume) --> checkpoint, records, seconds
        ^                                                                                |
        +------------- decrease of the job's loss / seconds of the slice ----------------+

What a slice has reached is in the job's checkpoint, which the next one goes on from, and in ``slices.json``, from which
the scheduler's state follows. A process that is killed between the two has made a slice that is not noted: the same job
is drawn again, and finds its budget spent. (In processes its last record was then not evaluated: it has the mean loss
of the last steps, and no test figures.)
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.api.job_turns import JobBudget, JobTurns, ranking
from paceline.api.train import check, opened, train
from paceline.core.errors import (
    InputError,
    NonFiniteError,
    PacelineError,
    check_choice,
    check_int,
    check_positive,
    unknown,
)
from paceline.core.safe_files import check_writable, reserved
from paceline.core.types import Seconds
from paceline.engine.base import Engine
from paceline.parameter_scheduling.schedulers import Scheduler
from paceline.program import Program
from paceline.progress import Report, measuring
from paceline.run import Run, require_package
from paceline.shared_runs import FILE, SharedRuns, Slice, job_folder, read_slices, write_slices
from paceline.strategy import Strategy, is_auto
from paceline.train_options import TrainOptions

__all__ = ["SharedRuns", "share_workers"]

LOSSES = ("train_loss", "test_loss")

# Arguments of train that can't be of a slice, and what to write instead.
_REFUSED = {
    "callbacks": "they would start and end with each slice; write train(…, callbacks=…) for one job",
    "epochs": "jobs have budgets in steps; write steps= for each job, or seconds= for all of them together",
    "trace": "spans would be those of a job's last slice alone; write train(…, trace=True) for one job",
}


def share_workers(
    programs: Mapping[str, Program] | Sequence[Program],
    strategy: Strategy | str = "replicas=1",
    *,
    engine: str | Engine = "local",
    seconds: Seconds | None = None,
    steps: int | None = None,
    until: str | Mapping[str, str] | None = None,
    slice_steps: int = 100,
    scheduler: Scheduler[Any] | str = "priority",
    loss: str = "train_loss",
    checkpoint: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    progress: bool | None = None,
    out: str | Path | None = None,
    tensorboard: bool = False,
    **settings: Any,
) -> SharedRuns:
    """Train several programs on the same workers, one at a time, each for a slice.

    With ``scheduler="priority"`` the next job is drawn with probability proportional to

        (decrease of its loss in its last slice) / (seconds of that slice) + η·(mean of those above 0),

    one that has had no slice before all others. Losses are compared as they are: jobs should have losses of one kind.

    A slice is ``train(…, steps=…, resume=True)``, under any strategy. Where replicas meet at the end of a slice anyway,
    a job ends with the bits of the same job trained alone for as many steps: under ``synchronous``, and in virtual time
    under ``local-steps:period=H`` if ``slice_steps`` is a multiple of H. Replicas at paces of their own wait for each
    other at the end of each slice, where in a job alone they would not.

    Args:
        programs: name -> program, or programs with different names.
        strategy: of all of them, a value or its text.
        engine: ``local``, ``virtual``, ``ray``, or an engine that is open; one for all slices.
        seconds: budget of all jobs together in training time, wall or virtual: start-up, evaluation and checkpoints
            don't count. The slice in which it ends is made to its end.
        steps: budget of each job in steps of each replica, after which it leaves.
        until: condition on a record at which a job leaves, ``"test_loss<=0.1"``: for all, or by name.
        slice_steps: steps of each replica in a slice; at each end the job is evaluated and saved.
        scheduler: which job is next: a value, or its text: ``priority:eta=0.01``, ``cyclic``, ``uniform``; see
            docs/parameter-scheduling.md.
        loss: ``train_loss``, on a fixed sample of the training set, or ``test_loss``.
        checkpoint: folder of the jobs' checkpoints; None: a temporary one, for as long as this lasts.
        resume: go on with what is in ``checkpoint``; where there is nothing, begin. Budgets are totals.
        seed: of the draws.
        progress: show a live display; None: if stderr is a terminal.
        out: folder to save slices and runs in; it must not exist.
        tensorboard: also write TensorBoard events to ``out``.
        settings: other keyword arguments of :func:`~paceline.train` for each slice: ``delay=``, ``times=``,
            ``on_death=``, ``evaluate_every=`` in steps, ``keep=``, …

    Returns:
        Slices and runs; after Ctrl-C or SIGTERM those up to then.

    Raises:
        InputError: something can't be done as written; nothing was started.
        NonFiniteError: a Δ of a job was not finite.
        PacelineError: a slice could not be saved, so that its job can't go on.
        WorkerError: the model, the loss or the data of a job failed in a worker.
    """
    jobs, order = _named(programs), ranking(scheduler, len(programs))
    _check(jobs, strategy, engine, slice_steps, loss, seed, settings)
    budget = _budget(jobs, seconds, steps, until)
    settings["evaluate_every"] = settings.get("evaluate_every") or slice_steps
    if tensorboard:
        if out is None:
            raise InputError("tensorboard=True writes next to the saved runs; write out='runs/a' too")
        require_package("tensorboard", "tensorboard=True")
    with ExitStack() as closing:
        if out is not None:
            closing.enter_context(reserved(out))
        engine = closing.enter_context(opened(engine))
        # All are checked before the first is trained.
        for name, program in jobs.items():
            check(program, strategy, engine=engine, steps=slice_steps, until=budget.until.get(name), **settings)
        folder = _folder(checkpoint, list(jobs), resume=resume)
        if folder is None:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
            settings["keep"] = 1
        turns = JobTurns(list(jobs), order, loss, slice_steps, budget, seed)
        workers = SharedWorkers(jobs, strategy, engine, budget.until, folder, settings)
        report = closing.enter_context(measuring(progress, f"{len(jobs)} jobs: {strategy}"))
        shared = _share(turns, workers, report)
        if out is not None:
            shared.save(out, tensorboard=tensorboard)
    return shared


@dataclass(frozen=True)
class SharedWorkers:
    """The workers that all jobs share, and the folder where they wait for their turn."""

    jobs: Mapping[str, Program]
    strategy: Strategy | str
    engine: Engine
    until: Mapping[str, str]
    folder: Path
    settings: Mapping[str, Any]

    def train(self, job: str, steps: int) -> Run:
        """Train a job from where it is until it has made so many steps."""
        folder = self.folder / job_folder(list(self.jobs).index(job), job)
        try:
            run = train(
                self.jobs[job], self.strategy, engine=self.engine, steps=steps, until=self.until.get(job),
                checkpoint=folder, resume=True, progress=False, **self.settings,
            )  # fmt: skip
        except NonFiniteError as error:
            raise NonFiniteError(f"job {job}: {error}") from error
        if not run.summary["interrupted"] and run.summary["notes"].get("checkpoint_updates") != run.summary["updates"]:
            raise PacelineError(
                f"job {job} could not be saved in {folder}, and can't go on; make room, or write another"
            )
        return run


def _share(turns: JobTurns, workers: SharedWorkers, report: Report) -> SharedRuns:
    """Make slices until none is left to make, after those that were made before; note each in the folder."""
    runs, signal = dict[str, Run](), None
    if (workers.folder / FILE).exists():
        for made in read_slices(workers.folder)[1]:
            turns.note(made)
    else:
        write_slices(workers.folder, turns.jobs, [])
    try:
        for job in dict.fromkeys(each.job for each in turns.slices):  # each finds its budget spent
            own = turns.of(job)
            runs[job] = _with_records(workers.train(job, own[-1].steps), own)
            signal = signal or _signal(runs[job])
        while signal is None and (turn := turns.next()) is not None:
            job, steps = turn
            run, own = workers.train(job, steps), turns.of(job)
            made = _slice(job, steps, run, own)
            runs[job] = _with_records(run, [*own, made])
            if (signal := _signal(run)) is None:
                turns.note(made)
                write_slices(workers.folder, turns.jobs, turns.slices)
                report(job, turns.fraction())
    except KeyboardInterrupt:
        if not runs:
            raise
        signal = "SIGINT"
    return SharedRuns(turns.jobs, runs, turns.slices, turns.ended() or f"ended by {signal}", signal)


def _signal(run: Run) -> str | None:
    """Return the name of the signal that ended a run; None: none did."""
    return run.summary.get("signal") or "SIGINT" if run.summary["interrupted"] else None


def _slice(job: str, steps: int, run: Run, own: Sequence[Slice]) -> Slice:
    """Return what a run has added to a job's earlier slices."""
    seconds = run.summary["seconds"] - sum(each.seconds for each in own)
    known = sum(len(each.records) for each in own)
    return Slice(job, steps, seconds, tuple(run.history[known:] or run.history[-1:]))


def _with_records(run: Run, own: Sequence[Slice]) -> Run:
    """Return a run with the records of its slices: where evaluation goes on beside training, the last one of a slice is
    in a checkpoint as it was before it was evaluated."""
    records = [record for each in own for record in each.records]
    return replace(run, history=[*records, *run.history[len(records) :]])


def _named(programs: Mapping[str, Program] | Sequence[Program]) -> dict[str, Program]:
    """Return the jobs by name."""
    if isinstance(programs, Mapping):
        named = list(programs.items())
    elif isinstance(programs, Sequence) and not isinstance(programs, str):
        named = [(getattr(each, "name", ""), each) for each in programs]
    else:
        named = []
    if not named:
        raise InputError(f"programs={programs!r} must be several programs; write {{'a': program, 'b': another}}")
    for name, program in named:
        if not isinstance(program, Program):
            raise InputError(
                f"job {name!r} is {type(program).__name__}, not a Program; write paceline.Program(model=…, …)"
            )
        if not isinstance(name, str) or not name:
            raise InputError(f"a job is called {name!r}; write a text, {{'a': program}}")
    names = [name for name, _ in named]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(
            f"two programs are called {twice!r}; write {{'{twice}-1': …, '{twice}-2': …}}, or name= in each"
        )
    return dict(named)


def _check(
    jobs: Mapping[str, Program],
    strategy: Strategy | str,
    engine: str | Engine,
    slice_steps: int,
    loss: str,
    seed: int,
    settings: Mapping[str, Any],
) -> None:
    """Refuse what is about slices; of each job :func:`check` refuses the rest."""
    check_int("slice_steps", slice_steps, least=1)
    check_int("seed", seed, least=0)
    check_choice("loss", loss, LOSSES)
    if is_auto(strategy):
        raise InputError("strategy='auto' is chosen for one program; write one for all jobs, 'replicas=2' for instance")
    name = engine if isinstance(engine, str) else engine.name
    if name.partition(":")[0] == "distributed":
        raise InputError(
            "ranks under torchrun measure slices by clocks of their own, and would draw different jobs; write "
            "engine='local', or 'ray'"
        )
    for setting, instead in _REFUSED.items():
        if settings.get(setting):
            raise InputError(f"{setting}={settings[setting]!r}: {instead}")
    without = [name for name, program in jobs.items() if program.test is None]
    if loss == "test_loss" and without:
        raise InputError(f"job {without[0]} has no test set, of which loss='test_loss' is; write loss='train_loss'")


def _budget(
    jobs: Mapping[str, Program], seconds: Seconds | None, steps: int | None, until: str | Mapping[str, str] | None
) -> JobBudget:
    """Return what ends jobs and all; refuse a budget that never ends."""
    if seconds is not None:
        check_positive("seconds", seconds, instead=60)
    if steps is not None:
        check_int("steps", steps, least=1)
    texts = dict(until) if isinstance(until, Mapping) else {} if until is None else dict.fromkeys(jobs, until)
    for name in texts:
        if name not in jobs:
            raise unknown("job in until=", str(name), jobs)
    endless = next((name for name in jobs if name not in texts), None)
    if seconds is None and steps is None and endless is not None:
        raise InputError(f"job {endless} would never leave; write seconds=60, or steps= of each job, or until=")
    parsed = {name: TrainOptions(steps=1, until=text).budget().until for name, text in texts.items()}
    return JobBudget(seconds, steps, texts, {name: found for name, found in parsed.items() if found is not None})


def _folder(checkpoint: str | Path | None, jobs: Sequence[str], *, resume: bool) -> Path | None:
    """Return the folder of checkpoints, which is new or, with ``resume``, may have slices of the same jobs."""
    if checkpoint is None:
        if resume:
            raise InputError("resume=True says no folder; write checkpoint='ckpt' too")
        return None
    check_writable(checkpoint)
    folder = Path(checkpoint).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        return folder
    if not (folder / FILE).exists():
        raise InputError(f"{checkpoint} holds files that are not of jobs on shared workers; write another folder")
    saved, _ = read_slices(folder)
    if not resume:
        raise InputError(f"{checkpoint} holds slices of {', '.join(saved)}; write resume=True to go on with them")
    if saved != list(jobs):
        raise InputError(
            f"{checkpoint} is of the jobs {', '.join(saved)}; write these, in this order, or another folder"
        )
    return folder
