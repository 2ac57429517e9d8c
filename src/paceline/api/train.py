"""train and launch: one program, one strategy, one run."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.callbacks.base import Callback, RunHandle
from paceline.callbacks.dispatch import Callbacks
from paceline.callbacks.out_files import OutFiles
from paceline.clock.times import Delay, Times
from paceline.core.errors import InputError, drop_engines_frames
from paceline.core.program_import import refuse_while_importing
from paceline.core.safe_files import check_working_folder, reserved
from paceline.core.types import OnDeath, OnNonFinite, Seconds
from paceline.engine import ENGINES, split_name
from paceline.engine.base import Engine, Job, Outcome, Progress, Watcher
from paceline.engine.run_context import is_main
from paceline.metrics.summary import summarize
from paceline.program import Program, no_data
from paceline.progress import interrupted, measuring, watcher
from paceline.replica.step_options import without_options
from paceline.run import Run, require_package
from paceline.strategy import AUTO, Strategy, is_auto
from paceline.train_options import TrainOptions, job_of


def open_engine(name: str) -> Engine:
    """Open an engine by name.

    Args:
        name: one of the :data:`~paceline.engine.ENGINES`; ``ray:auto`` and ``ray:HOST:PORT`` join a Ray cluster that is
            running, ``distributed:gloo``, ``:nccl``, ``:shm`` and ``:hierarchical`` set the backend.

    Returns:
        The engine, a context manager that is to be closed after its last run.

    Raises:
        InputError: no such engine, or what it needs is not installed.
    """
    kind, address = split_name(name)
    engine: type[Engine] = ENGINES.entry(kind).cls
    return engine.from_address(address)


def opened(engine: str | Engine) -> AbstractContextManager[Engine]:
    """Return the context of an engine: one that is given by its name is closed at the end, an open one stays open."""
    return nullcontext(engine) if isinstance(engine, Engine) else open_engine(engine)


def train(
    program: Program,
    strategy: Strategy | str = "replicas=1",
    *,
    engine: str | Engine = "local",
    steps: int | None = None,
    epochs: float | None = None,
    seconds: Seconds | None = None,
    until: str | None = None,
    evaluate_every: float | None = None,
    delay: Delay | str | None = None,
    times: Times | str | None = None,
    trace: bool = False,
    progress: bool | None = None,
    out: str | Path | None = None,
    on_nonfinite: OnNonFinite = "stop",
    on_death: OnDeath | None = None,
    suspect_after_s: Seconds = 5.0,
    timeout_s: Seconds = 60.0,
    tensorboard: bool = False,
    loop: Callable[[Any], None] | None = None,
    noise_scale: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: str | Seconds | None = None,
    keep: int = 3,
    resume: bool | str | os.PathLike[str] = False,
    accept_changes: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a program under a strategy.

    Args:
        program: model, loss, optimizer and data.
        strategy: how training is split and paced, a value or its text; ``auto``: the strategy that trains most samples
            per second on this host's cores, which is measured first and takes some seconds.
        engine: ``local`` (processes on this host), ``virtual`` (one process, simulated time), ``ray`` (actors of a Ray
            that is started on this host), ``ray:auto`` or ``ray:HOST:PORT`` (of a Ray that is running), ``distributed``
            (the processes that torchrun started, this one among them; ``distributed:gloo`` and the like), or an engine
            that is already open.
        steps: budget in steps of each replica.
        epochs: budget in passes over the training set by all replicas together.
        seconds: budget in training time, wall or virtual; start-up and evaluation don't count.
        until: condition on a record that ends the run: ``"test_accuracy>=0.97"``; alone or in addition to a budget.
        evaluate_every: distance of two evaluation points, in the budget's unit (seconds if there is only ``until``);
            by default 20 points over the budget.
        delay: slows some replicas: ``"fraction=0.5 normal:mean=0,std=0.25"``, in seconds per gradient.
        times: durations in the virtual engine, in seconds: ``"compute=0.01 transfer=0 apply=0 gradient=0"``;
            ``"measured"``: the measured times of a step's components on this host; ``"network=cluster.toml"``: a file's
            hosts and links instead of ``transfer``, see docs/choosing-a-policy.md.
        trace: record spans.
        progress: show a live display; None: if stderr is a terminal.
        out: folder to save the run in; it must not exist.
        on_nonfinite: ``stop`` at a loss or gradient that is not finite, or ``skip`` it: discard and count.
        on_death: ``continue`` without a replica that dies, ``replace`` it by another that makes its step anew, or
            ``stop``; with the first two an exception in a worker counts as its death. None: ``continue`` where the
            engine can, and exceptions end the run.
        suspect_after_s: silence in seconds after which a replica that computes, and usually takes much less for a step,
            is named; if ``on_death`` is ``continue`` or ``replace``, it is killed, and so dead. Engines ``local`` and
            ``ray``; on ``distributed`` the others go on without it, if they are more than half.
        timeout_s: bound in seconds on start-up and on every wait for a worker that should answer at once; also on the
            capture of a model that is divided, which has 60 s at least.
        tensorboard: also write TensorBoard events to ``out``, while the run lasts.
        loop: the user's own loop, called with a worker on every replica; see :func:`launch`.
        noise_scale: estimate from the gradients up to which batch size samples are worth their cost: records, summary
            and display then have the noise scale in samples, the statistical efficiency and the goodput; see
            docs/efficiency.md.
        checkpoint: folder to save the run in while it lasts, and once at its end; see docs/checkpoints.md.
        checkpoint_every: "5min", "90 s" or "500 steps" of each replica, or seconds of training; None: five minutes.
        keep: how many checkpoints are kept.
        resume: go on from the newest sound checkpoint in ``checkpoint``, in any split and under any policy; where there
            is none, begin. Or another folder of checkpoints, or one of them, to go on from. Budgets are totals: what
            was spent before counts.
        accept_changes: go on though the checkpoint is of another program, with this one's own options.
        callbacks: what is done at each record, departure and checkpoint, and may end training:
            ``[paceline.callbacks.EarlyStopping()]``; see docs/callbacks.md.

    Returns:
        The run; after Ctrl-C or SIGTERM the part up to then, with ``summary["interrupted"]`` true; where a callback has
        ended training, ``summary["stopped"]`` has its reason. If ``out`` can't be
        written at the end (the disk is full, say), ``summary["not_saved"]`` says why, and :meth:`Run.save` can still
        save it.

    Raises:
        InputError: something can't be done as written; nothing was started.
        NonFiniteError: a Δ was not finite, under ``on_nonfinite="stop"``.
        WorkerError: the model, the loss, the data or the loop failed in a worker.
        CallbackError: a callback failed.
    """
    options = TrainOptions(
        steps, epochs, seconds, until, evaluate_every, delay, times, trace, on_nonfinite, on_death,
        suspect_after_s, timeout_s, loop, noise_scale, checkpoint, checkpoint_every, keep, resume, accept_changes,
        callbacks,
    )  # fmt: skip
    return train_with(program, strategy, engine, options, progress=progress, out=out, tensorboard=tensorboard)


def train_with(
    program: Program,
    strategy: Strategy | str,
    engine: str | Engine,
    options: TrainOptions,
    *,
    progress: bool | None = None,
    out: str | Path | None = None,
    tensorboard: bool = False,
) -> Run:
    """Train as :func:`train` does, all of whose other arguments are ``options``."""
    refuse_while_importing("train" if options.loop is None else "launch")
    check_working_folder()
    # Refused now rather than after hours of training; under torchrun by the rank that writes there, and may have begun.
    writes = is_main(engine if isinstance(engine, str) else engine.name)
    if out is None or not writes:
        folder = None if out is None else Path(out).absolute()
        return _trained(program, strategy, engine, options, folder, progress=progress, tensorboard=tensorboard)
    with reserved(out) as folder:
        return _trained(program, strategy, engine, options, folder, progress=progress, tensorboard=tensorboard)


def _trained(
    program: Program,
    strategy: Strategy | str,
    engine: str | Engine,
    options: TrainOptions,
    folder: Path | None,
    *,
    progress: bool | None,
    tensorboard: bool,
) -> Run:
    if tensorboard:
        if folder is None:
            raise InputError("tensorboard=True writes next to the saved run; write out='runs/a' too")
        require_package("tensorboard", "tensorboard=True")
    with opened(engine) as engine:
        strategy = resolve_auto(program, strategy, engine, options, progress)
        job = replace(job_of(program, strategy, engine, options, engine.warming_up), out=folder)
        if tensorboard:  # asked for to be looked at while the run lasts
            job = replace(job, callbacks=True)
        files = OutFiles(folder, tensorboard)
        before = list(job.resume.run.history.records) if job.resume is not None else []
        handle = RunHandle(program.name, str(Strategy.coerce(strategy)), engine.name, folder, before)
        callbacks = Callbacks([*files.callbacks, *options.callbacks], handle, lambda: is_main(engine.name))
        outcome = _outcome(engine, job, callbacks, files, progress)
    host = engine.name != "virtual"  # times and memory of this process say nothing about simulated workers
    shards = job.strategy.tensor_parallel
    summary = summarize(
        outcome.account,
        outcome.history,
        host=host,
        spans=outcome.spans,
        shards=shards,
        waits_known=_waits_known(job.strategy),
    )
    strategy, state, history = Strategy.coerce(strategy), dict(outcome.state), list(outcome.history)
    left, spans = list(outcome.account.left), list(outcome.spans)
    run = Run(program.name, strategy, engine.name, state, summary, history, left, spans, without_options(outcome.model))
    # Under torchrun every rank has the run; one of them saves it.
    if folder is not None and is_main(engine.name):
        callbacks.end(run, files.callbacks)
        try:
            run.save(folder, files=files.remove())
        except InputError as error:  # the disk is full, say: what was trained must not be lost
            run.summary["not_saved"] = str(error)
            print(f"paceline: not saved: {error}; the returned run has it all, save it elsewhere", file=sys.stderr)
    callbacks.end(run)
    return run


def _waits_known(strategy: Strategy) -> bool:
    """Return whether all waits of workers for each other are measured: not those within a collective or on a device."""
    collectives = strategy.tensor_parallel or strategy.replicated or strategy.shard_parameters
    on_device = strategy.stage_count > 1 and strategy.device != "cpu"
    return not (collectives or on_device)


def _outcome(engine: Engine, job: Job, callbacks: Callbacks, files: OutFiles, progress: bool | None) -> Outcome:
    """Run a job, with a display, files and callbacks in this process."""
    shown, start = is_main(engine.name), "compiling" if job.strategy.compile else "starting"
    with watcher(progress if shown else False, f"{job.program.name}: {job.strategy}", start) as display:

        def show(newest: Progress) -> None:
            display(newest)
            callbacks.progress(newest)
            files.progress(newest)

        def heard(first: str) -> None:
            if shown and progress is not False:
                print(interrupted(first, job.checkpoint.folder if job.checkpoint else None), file=sys.stderr)

        try:
            callbacks.start()
            return engine.run(job, Watcher(show, callbacks.take, callbacks.stopped, heard))
        except BaseException as error:
            callbacks.end(None)
            if shown:
                files.remove()
            drop_engines_frames(error)
            raise


def launch(
    loop: Callable[[Any], None], program: Program, strategy: Strategy | str = "replicas=1", **settings: Any
) -> Run:
    """Run your own loop on every replica: ``for batch in worker.batches(): loss = worker.step(batch)``.

    Args:
        loop: called with a :class:`~paceline.engine.worker.Worker`; may be a lambda or a notebook's function.
        program: model, loss, optimizer and data.
        strategy: how training is split and paced, a value or its text.
        settings: keyword arguments of :func:`train`; without a budget each replica makes one pass (``epochs=1``), or,
            of a program without data, goes on until its loop returns.

    Returns:
        The run, as :func:`train` returns it.

    Raises:
        InputError: something can't be done as written; nothing was started.
        NonFiniteError: a Δ was not finite, under ``on_nonfinite="stop"``.
        WorkerError: the model, the loss, the data or the loop failed in a worker.
    """
    budget = any(settings.get(unit) is not None for unit in ("steps", "epochs", "seconds", "until"))
    if not budget and program.train is not no_data:
        settings["epochs"] = 1
    return train(program, strategy, loop=loop, **settings)


def resolve_auto(
    program: Program, strategy: Strategy | str, engine: Engine, options: TrainOptions, progress: bool | None = None
) -> Strategy | str:
    """Return ``strategy`` itself, or, if it is ``auto``, the chosen one, after one line on stderr with the reason.

    Raises:
        InputError: ``train`` would refuse whatever is chosen, or nothing can be chosen for this engine.
    """
    if not is_auto(strategy):
        return strategy
    # Not at the top: it imports all of the planner.
    from paceline.planner.program.plans import choose, refuse

    refuse(strategy, engine.name)
    job_of(program, "replicas=1", engine, options)
    line = f"{program.name}: {AUTO} measures its operators and short runs on this host, for a minute at most"
    with measuring(progress, f"{program.name}: planning", line=line) as report:
        chosen = choose(program, report)
    print(chosen.why, file=sys.stderr)
    if chosen.plan is not None:
        from paceline.api.plan_verification import compiled_if_it_pays

        if (compiled := compiled_if_it_pays(train, chosen.plan, program, options, progress)) is not None:
            print(f"{AUTO}: {compiled}", file=sys.stderr)
            return compiled.plan.strategy or chosen.strategy
    return chosen.strategy


def check(program: Program, strategy: Strategy | str, *, engine: str | Engine = "local", **settings: Any) -> None:
    """Raise the error with which :func:`train` would refuse these arguments; start nothing.

    Args:
        program: model, loss, optimizer and data.
        strategy: how training is split and paced, a value or its text.
        engine: name of an engine, or an open engine.
        settings: keyword arguments of :func:`train` other than ``progress``, ``out`` and ``tensorboard``.

    Raises:
        InputError: something can't be done as written.
    """
    with opened(engine) as engine:
        if is_auto(strategy):
            from paceline.planner.program.plans import refuse

            refuse(strategy, engine.name)
            strategy = "replicas=1"  # refused like whatever would be chosen
        job_of(program, strategy, engine, TrainOptions.of("check", settings))
