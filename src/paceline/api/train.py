"""train and launch: one program, one strategy, one run."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.clock.times import Delay, Times
from paceline.core.errors import InputError, unknown
from paceline.core.types import Seconds
from paceline.engine import ENGINES
from paceline.engine.base import Engine, OnNonFinite
from paceline.engine.run_context import is_main
from paceline.metrics.summary import summarize
from paceline.program import Program
from paceline.progress import measuring, watcher
from paceline.run import Run, check_out, require_tensorboard
from paceline.strategy import Strategy, is_auto
from paceline.train_options import TrainOptions, job_of


def open_engine(name: str) -> Engine:
    """Open the engine of a name; it is a context manager, to be closed after its last run.

    Args:
        name: of one of the :data:`~paceline.engine.ENGINES`; ``ray:auto`` and ``ray:HOST:PORT`` join a Ray cluster
            that is running, ``distributed:gloo``, ``:nccl``, ``:shm`` and ``:hierarchical`` set the backend.

    Raises:
        InputError: no such engine, or what it needs is not installed.
    """
    kind, colon, address = name.partition(":")
    if kind not in ENGINES.names():
        raise unknown("engine", name, ENGINES.names())
    engine: type[Engine] = ENGINES.entry(kind).cls
    return engine.from_address(address if colon else None)


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
    timeout_s: Seconds = 60.0,
    tensorboard: bool = False,
    loop: Callable[[Any], None] | None = None,
    noise_scale: bool = False,
) -> Run:
    """Train a program under a strategy.

    Args:
        program: what is trained.
        strategy: how it is split and paced, a value or its text; ``auto``: whichever trains most samples a second on
            this host's cores, which is measured first and takes some seconds.
        engine: ``local`` (processes on this host), ``virtual`` (one process, simulated time), ``ray`` (actors of a Ray
            that is started on this host), ``ray:auto`` or ``ray:HOST:PORT`` (of one that is running), ``distributed``
            (the processes that torchrun started, this one among them; ``distributed:gloo`` and the like), or one that
            is already open.
        steps: budget in steps of each replica.
        epochs: budget in passes over the training set by all replicas together.
        seconds: budget in training time, wall or virtual; start-up and scoring are outside.
        until: condition on a record that ends the run: ``"test_accuracy>=0.97"``; alone or beside a budget.
        evaluate_every: distance of two evaluation points, in the budget's unit (seconds where there is only ``until``);
            by default 20 points over the budget.
        delay: slows some replicas: ``"fraction=0.5 normal:mean=0,std=0.25"``, in seconds per gradient.
        times: of the virtual engine, in seconds: ``"compute=0.01 transfer=0 apply=0 gradient=0"``; ``"measured"``: what
            the pieces of a step take on this host.
        trace: record spans.
        progress: show it live; by default where standard error is a terminal.
        out: folder to save the run in; must not exist.
        on_nonfinite: ``stop`` at a loss or gradient that is not finite, or ``skip`` it: discard and count.
        timeout_s: bound on every wait for a worker that should answer at once, and on start-up.
        tensorboard: also write TensorBoard events to ``out``.
        loop: the user's own loop, called with a worker on every replica; see :func:`launch`.
        noise_scale: tell from the gradients how large a batch is worth its samples: the records, the summary and the
            display then have the noise scale, the statistical efficiency and the goodput; see docs/efficiency.md.

    Returns:
        The run; after Ctrl-C what there is of it, with ``summary["interrupted"]`` true.

    Raises:
        InputError: what can't be done as written; nothing was started.
        NonFiniteError: a Δ was not finite, under ``on_nonfinite="stop"``.
        WorkerError: the model, the loss, the data or the loop failed in a worker.
    """
    settings = TrainOptions(
        steps, epochs, seconds, until, evaluate_every, delay, times, trace, on_nonfinite, timeout_s, loop, noise_scale
    )
    folder = check_out(out) if out is not None else None
    if tensorboard and folder is None:
        raise InputError("tensorboard=True writes beside the saved run; write out='runs/a' too")
    if tensorboard:
        require_tensorboard()
    with nullcontext(engine) if isinstance(engine, Engine) else open_engine(engine) as carrier:
        strategy = resolved(program, strategy, carrier, settings, progress)
        job = replace(job_of(program, strategy, carrier, settings), out=folder)
        with watcher(progress if is_main(carrier.name) else False, f"{program.name}: {job.strategy}") as watch:
            outcome = carrier.run(job, watch)
    run = Run(
        program_name=program.name,
        strategy=Strategy.coerce(strategy),
        engine=carrier.name,
        state=dict(outcome.state),
        model=outcome.model,
        history=list(outcome.history),
        summary=summarize(
            outcome.account,
            outcome.history,
            host=carrier.name != "virtual",
            spans=outcome.spans,
            shards=job.strategy.tensor_parallel,
        ),
        spans=list(outcome.spans),
        left=list(outcome.account.left),
    )
    if folder is not None and is_main(carrier.name):
        run.save(folder, tensorboard=tensorboard)
    return run


def launch(
    loop: Callable[[Any], None], program: Program, strategy: Strategy | str = "replicas=1", **settings: Any
) -> Run:
    """Run your own loop on every replica: ``for batch in worker.batches(): loss = worker.step(batch)``.

    Args:
        loop: called with a :class:`~paceline.engine.worker.Worker`; may be a lambda or a notebook's function.
        program: what is trained.
        strategy: how it is split and paced.
        settings: those of :func:`train`; without a budget each replica makes one pass (``epochs=1``).
    """
    if not callable(loop):
        raise InputError(
            f"loop={loop!r} can't be called; write launch(loop, program, strategy) with def loop(worker): …"
        )
    if all(settings.get(unit) is None for unit in ("steps", "epochs", "seconds", "until")):
        settings["epochs"] = 1
    return train(program, strategy, loop=loop, **settings)


def resolved(
    program: Program, strategy: Strategy | str, engine: Engine, settings: TrainOptions, progress: bool | None = None
) -> Strategy | str:
    """``strategy`` itself; where it is ``auto``, the one that is chosen, after one line on stderr that says why.

    Raises:
        InputError: what ``train`` would refuse whatever is chosen, or an engine on which nothing can be chosen.
    """
    if not is_auto(strategy):
        return strategy
    from paceline.planner.program.plans import choose  # not before: it imports all of the planner

    _check_auto(program, strategy, engine, settings)
    with measuring(progress, f"{program.name}: planning") as tell:
        chosen = choose(program, tell)
    print(chosen.why, file=sys.stderr)
    return chosen.strategy


def _check_auto(program: Program, strategy: str, engine: Engine, settings: TrainOptions) -> None:
    """What would be refused whatever is chosen."""
    from paceline.planner.program.plans import refuse

    refuse(strategy, engine.name)
    job_of(program, "replicas=1", engine, settings)


def check(program: Program, strategy: Strategy | str, *, engine: str | Engine = "local", **settings: Any) -> None:
    """Raise what :func:`train` with these words would refuse; start nothing.

    Args:
        program: what is to be trained.
        strategy: how it is to be split and paced.
        engine: by name, or open.
        settings: those of :func:`train` that say what is run.
    """
    with nullcontext(engine) if isinstance(engine, Engine) else open_engine(engine) as carrier:
        if is_auto(strategy):
            _check_auto(program, strategy, carrier, TrainOptions(**settings))
        else:
            job_of(program, strategy, carrier, TrainOptions(**settings))
