"""Options of a run, and the checks of all its arguments before anything starts."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from torch.utils.data import DataLoader, IterableDataset

from paceline import support
from paceline.aggregation import Aggregation, text_of
from paceline.aggregation.contract import check_properties, check_start
from paceline.callbacks.base import Callback, check_callbacks
from paceline.callbacks.early_stopping import EarlyStopping
from paceline.checkpoint.fingerprint import differences
from paceline.checkpoint.manifest import checkpoint_folders
from paceline.checkpoint.options import OPTIONS, CheckpointOptions, written_options
from paceline.checkpoint.reader import Checkpoint, find, nothing_in
from paceline.clock.times import Delay, Times
from paceline.core.conditions import Condition
from paceline.core.delta import Gradient
from paceline.core.errors import InputError, unknown
from paceline.core.option_checks import check_amounts, check_folder_given, check_reactions
from paceline.core.records import STATISTICS
from paceline.core.safe_files import check_writable
from paceline.core.types import BudgetUnit, OnDeath, OnNonFinite, Seconds
from paceline.device import resolved
from paceline.engine.base import Budget, Engine, Job
from paceline.engine.dry_run import DryRun, dry_run
from paceline.engine.own_loop import check_loop
from paceline.engine.run_context import first_batch, order_of
from paceline.engine.run_state import ResumePoint
from paceline.program import Data, Program, is_source, length, no_data, no_loss
from paceline.replica.step_options import BUFFER, WithStepOptions
from paceline.strategy import Strategy
from paceline.support import Case

V = TypeVar("V", Delay, Times)

_EXAMPLES = {"delay": "fraction=0.5 normal:mean=0,std=0.25", "times": "compute=0.01 transfer=0 apply=0 gradient=0"}

# Arguments of DataLoader that follow from the program's batch size and seed.
_LOADER_RESERVED = ("batch_sampler", "batch_size", "drop_last", "generator", "in_order", "sampler", "shuffle")

# Distance of evaluation points that never come.
NEVER_S: Seconds = 1e9

# Evaluation points over a budget after the one at its start, if evaluate_every is not given.
POINTS = 20


@dataclass(frozen=True)
class TrainOptions:
    """Arguments of :func:`~paceline.api.train.train` about one run; see there."""

    steps: int | None = None
    epochs: float | None = None
    seconds: Seconds | None = None
    until: str | None = None
    evaluate_every: float | None = None
    delay: Delay | str | None = None
    times: Times | str | None = None
    trace: bool = False
    on_nonfinite: OnNonFinite = "stop"
    on_death: OnDeath | None = None
    suspect_after_s: Seconds = 5.0
    timeout_s: Seconds = 60.0
    loop: Callable[[Any], None] | None = None
    noise_scale: bool = False
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: str | Seconds | None = None
    keep: int = 3
    resume: bool | str | os.PathLike[str] = False
    accept_changes: bool = False
    callbacks: Sequence[Callback] = ()
    found: tuple[Checkpoint | None, list[str]] | None = None
    """What ``resume`` names, where it was found and verified already, as ``find`` returns it."""
    dropped: tuple[str, ...] = ()
    """Options of the run that goes on which are not among these, though nobody has said so."""

    @classmethod
    def of(cls, call: str, settings: Mapping[str, Any]) -> "TrainOptions":
        """Return the options that are given by name to the function ``call``; InputError for one that is none."""
        names = [field.name for field in fields(cls) if field.name not in ("found", "dropped")]
        for name in settings:
            if name not in names:
                raise unknown(f"argument of {call}", name, names)
        return cls(**settings)

    def check(self) -> None:
        """Raise InputError if an option has a value that it can't have."""
        check_callbacks(self.callbacks)
        patience = {"timeout_s": self.timeout_s, "suspect_after_s": self.suspect_after_s}
        check_reactions(self.on_nonfinite, self.on_death, **patience)
        if not isinstance(self.resume, (bool, str, os.PathLike)):
            raise InputError(f"resume={self.resume!r} is neither True nor a folder of checkpoints; write resume=True")
        for name in ("noise_scale", "accept_changes"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InputError(f"{name}={value!r} is neither True nor False; write {name}=True")
        check_folder_given(self.checkpoint, checkpoint_every=self.checkpoint_every, resume=self.resume is True)

    def checkpoints(self) -> CheckpointOptions | None:
        """Return where and how often the run is saved; None: never.

        Raises:
            InputError: it can't be read as that, the folder can't be written, or it has checkpoints of another run.
        """
        if self.checkpoint is None:
            return None
        options = CheckpointOptions.of(self.checkpoint, self.checkpoint_every, self.keep)
        check_writable(options.folder)
        options.check_free()
        goes_on = self.resume is True or (self.resume and Path(self.resume).absolute() == options.folder)
        if not goes_on and checkpoint_folders(options.folder):
            raise InputError(
                f"{self.checkpoint} holds checkpoints of an earlier run; write resume=True to go on with it, or give "
                "another folder"
            )
        return options

    def resumed(self) -> Checkpoint | None:
        """Return the checkpoint to go on from, verified; None where there is none in ``checkpoint=``, or none is asked.

        Raises:
            InputError: ``resume`` is a folder without a sound checkpoint.
        """
        if self.resume is False:
            return None
        folder = Path(self.checkpoint if self.resume is True else self.resume)  # type: ignore[arg-type]
        checkpoint, damaged = self.found or find(folder)
        for sentence in damaged:
            print(f"paceline: passed over: {sentence}", file=sys.stderr)
        if checkpoint is None and self.resume is not True:
            raise nothing_in(folder)
        return checkpoint

    def budget(self, *, loop_ends: bool = False) -> Budget:
        """Return the budget of the run; raise InputError if there is more than one, or none.

        Args:
            loop_ends: whether there may be none, for a loop ends by itself.
        """
        units: tuple[BudgetUnit, ...] = get_args(BudgetUnit)
        if loop_ends and all(getattr(self, each) is None for each in (*units, "until")):
            return Budget("seconds", None, self.evaluate_every or NEVER_S)
        given: dict[BudgetUnit, float] = {u: a for u in units if (a := getattr(self, u)) is not None}
        unit: BudgetUnit
        if len(given) > 1 or not (given or self.until):
            raise InputError(
                f"a run needs one budget, but has {' and '.join(f'{u}={a}' for u, a in given.items()) or 'none'}; "
                "write seconds=60, or steps=, or epochs=, or until="
            )
        unit, amount = next(iter(given.items())) if given else ("seconds", None)
        check_amounts({name: getattr(self, name) for name in (*units, "evaluate_every")})
        every = self.evaluate_every or (amount / POINTS if amount is not None else NEVER_S)
        return Budget(unit, amount, every, Condition.parse(self.until) if self.until is not None else None)


def job_of(
    program: Program,
    strategy: Strategy | str,
    engine: Engine,
    options: TrainOptions,
    meanwhile: Callable[[Strategy], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Job:
    """Return the checked and resolved job of a run.

    Args:
        program: model, loss, optimizer and data.
        strategy: a value or its text.
        engine: the engine that is to run it.
        options: all other arguments.
        meanwhile: is entered while the program's own code is run.

    Raises:
        InputError: something can't be done as written.
    """
    if not isinstance(program, Program):
        raise InputError(f"program is {type(program).__name__}, not a Program; write paceline.Program(model=…, …)")
    strategy = Strategy.coerce(strategy)
    if not isinstance(strategy, Strategy):
        raise InputError(f"strategy is {type(strategy).__name__}, not a Strategy or its text; write 'replicas=4'")
    strategy = replace(strategy, device=resolved(strategy.device))
    own_steps = program.loss is no_loss or program.train is no_data
    if options.loop is None:
        _check_whole(program)
    else:
        check_loop(options.loop)
    options.check()
    limited: dict[str, Any] = {name: getattr(options, name) for name in ("on_nonfinite", "on_death", "noise_scale")}
    same = limited | {name: getattr(options, name) for name in ("trace", "suspect_after_s", "timeout_s", "loop")}
    with_times = options.times is not None
    of_program = {"clip_norm": program.clip_norm, "global_batch": program.global_batch_size is not None}
    check_properties(strategy.aggregation)
    case = Case.of(strategy, engine.name, engine.features, times=with_times, **of_program, **limited)
    support.refuse(case)
    if strategy.pipelined:
        strategy.order.refuse(strategy.stage_count, strategy.micro_batch_count)
    budget = options.budget(loop_ends=options.loop is not None and (engine.joins or program.train is no_data))
    _check_data(program, strategy, budget)
    draft = Job(program, strategy, budget)
    # One step in this process shows what only the model's own code knows.
    few = strategy.device != "cpu" or strategy.pipelined  # a pipeline's last stage looks at the whole batch
    with meanwhile(strategy):
        seen = dry_run(program, None if own_steps else first_batch(draft), few=few)
    _check_fields(budget, program, seen, options)
    _check_written(seen, strategy.aggregation)
    # What a policy leaves open (a learning rate, the number of replicas) is fixed here once, for every engine alike.
    aggregation = strategy.aggregation.resolved(learning_rate=seen.learning_rate, replicas=strategy.replicas)
    check_start(aggregation, strategy.replicas, saved=options.checkpoint is not None)
    if seen.on_losses:
        _check_evaluations(draft, case, options)
    model, running = program.model, seen.running_buffers
    if options.loop is not None and not (strategy.spread or strategy.shard_parameters):  # where it may make steps
        model, running = WithStepOptions(model, seen.options), (*running, BUFFER)
    kinds: dict[str, type[Any]] = {"delay": Delay, "times": Times}
    parsed: dict[str, Any] = {name: _parsed(kind, name, getattr(options, name)) for name, kind in kinds.items()}
    written, others = written_options({name: getattr(options, name) for name in OPTIONS} | parsed)
    job = replace(
        draft,
        program=replace(program, model=model, optimizer=seen.optimizer, metrics=seen.metrics),
        strategy=replace(strategy, aggregation=aggregation),
        running_buffers=running,
        on_losses=seen.on_losses,
        engine=engine.name,
        callbacks=bool(options.callbacks),
        checkpoint=options.checkpoints(),
        fingerprint=seen.fingerprint,
        modules=seen.modules,
        joins=engine.joins,
        options=written,
        other_options=others,
        **same,
        **parsed,
    )
    engine.refuse(job)
    checkpoint = options.resumed()
    return job if checkpoint is None else _resumed(job, checkpoint, options)


def _resumed(job: Job, checkpoint: Checkpoint, options: TrainOptions) -> Job:
    """Return the job as it goes on from a checkpoint, which has been verified.

    Raises:
        InputError: it is of another program, and that was not accepted.
    """
    point = ResumePoint.of(checkpoint)
    changes = differences(point.fingerprint, job.fingerprint, ("the checkpoint", "this program"))
    if changes and not options.accept_changes:
        raise InputError(
            f"{checkpoint.folder} is of another program: {changes}; write accept_changes=True to go on with "
            "this one, or checkpoint= another folder"
        )
    return replace(job, resume=replace(point, options=not changes, dropped=options.dropped))


def _parsed(kind: type[V], name: str, value: V | str | None) -> V | None:
    if isinstance(value, str):
        return kind.parse(value)
    if value is not None and not isinstance(value, kind):
        raise InputError(f"{name}={value!r} is no {kind.__name__} and no text; write {name}='{_EXAMPLES[name]}'")
    return value


def _check_whole(program: Program) -> None:
    """Raise InputError where a program lacks what only a loop of its own can do without."""
    missing = {"loss": program.loss is no_loss, "train": program.train is no_data}
    loop = "paceline.launch(loop, program, strategy) with a loop that computes its own gradients"
    for name, absent in missing.items():
        if absent:
            raise InputError(f"Program({name}=…) is missing; write it, or {loop}")
    if isinstance(program.optimizer, Mapping):
        names = ", ".join(map(repr, program.optimizer))
        raise InputError(f"optimizer={{{names}}}: several step when a loop says so; write one, or {loop}")


def _check_data(program: Program, strategy: Strategy, budget: Budget) -> None:
    """Raise InputError for options of the data loader, or of data that is a function, that can't have an effect."""
    options = inspect.signature(DataLoader.__init__).parameters.keys() - {"self", "dataset", *_LOADER_RESERVED}
    whole_batches = isinstance(program.train, IterableDataset) and program.loader.get("batch_size", 1) is None
    for name in program.loader:
        if name == "batch_size" and whole_batches:
            continue
        if name in _LOADER_RESERVED:
            raise InputError(
                f"loader={{{name!r}: …}}: which samples make a batch is said by batch_size= and seed=; leave {name} out"
            )
        if name not in options:
            raise unknown("option of loader=", name, options)
    if not is_source(program.train):
        return
    what = "an IterableDataset" if isinstance(program.train, IterableDataset) else "a function"
    if budget.unit == "epochs" and budget.amount is not None:
        raise InputError(
            f"epochs= needs a training set of known length, but train= is {what}; write steps= or seconds="
        )
    if program.shuffle is not None:
        raise InputError(f"shuffle={program.shuffle} has no effect: train= is {what}, which has an order of its own")
    if program.drop_last and (what == "a function" or whole_batches):
        raise InputError("drop_last=True has no effect: train= makes the batches; leave it out")
    if strategy.aggregation.portions is not None:
        raise InputError(
            f"aggregation={text_of(strategy.aggregation)} cuts batches of a training set of known length into "
            f"portions, but train= is {what}, which makes the batches of each replica; write train= as a data set"
        )
    if strategy.partition != "global":
        raise InputError(
            f"partition={strategy.partition} needs a training set to divide, but train= is {what}, which is divided "
            "by its batches; leave partition out"
        )
    if program.global_batch_size is not None:
        raise InputError(
            f"global_batch_size= has no effect if train= is {what}, of which replicas have no number of samples in "
            "common; write batch_size="
        )


def _check_evaluations(job: Job, case: Case, options: TrainOptions) -> None:
    """Raise InputError unless each update is an evaluation of the same samples, as an optimizer on losses needs it."""
    strategy, order, what = job.strategy, order_of(job), "an optimizer on losses, as LBFGS,"
    policy = strategy.aggregation
    whole = policy.collective is not None or policy.portions is not None
    if not (policy.current and whole and isinstance(policy.delta, Gradient)):
        raise InputError(
            f"{what} needs loss and gradient of all samples at one A, but aggregation={text_of(policy)} combines Δs of "
            "others, or of some; write aggregation=sandblaster, or aggregation=synchronous"
        )
    if not case.served and "no-server" in case.features:
        raise InputError(
            f"{what} needs the loss of all replicas, which ranks in lockstep do not exchange; write "
            "aggregation=sandblaster, or engine=local"
        )
    changes = {"clip_norm": job.program.clip_norm, "compression": strategy.compression}
    for name, value in changes.items():
        if value not in (None, "none"):
            raise InputError(
                f"{what} takes Δ for the gradient of the loss, which {name}={value} makes it not; leave {name} out"
            )
    if getattr(strategy.aggregation, "combine", "mean") != "mean" or options.on_nonfinite == "skip":
        raise InputError(
            f"{what} needs the mean over all samples of each batch; write combine=mean and on_nonfinite='stop'"
        )
    rounds = order.rounds_per_epoch(0) if order is not None and order.epoch_samples == order.samples else None
    if order is None or rounds != strategy.accumulate:
        shares = (strategy.aggregation.portions or strategy.replicas) * strategy.accumulate
        each = -(-length(cast(Data, job.program.train)) // shares) if order is not None else None
        instead = f"batch_size={each}" if each is not None else "train= as a data set"
        of = f"a round of {shares} batches is a part of them" if rounds else "train is a function"
        raise InputError(
            f"{what} compares losses at different A, so each update must be of all samples of the training set, but "
            f"{of}; write {instead}, or aggregation=sandblaster:portions= with as many portions as it has batches"
        )


def _check_written(seen: DryRun, aggregation: Aggregation[Any]) -> None:
    """Refuse a model that writes its own parameters where replicas only read A."""
    if seen.written and isinstance(aggregation.delta, Gradient):
        raise InputError(
            f"the model writes its parameter {seen.written[0]} in forward or backward (an Embedding with max_norm=, "
            f"a clamp_?), but under aggregation={text_of(aggregation)} replicas only read A; do it to a copy "
            "in forward, or write aggregation=local-steps:period=1, where each replica has parameters of its own"
        )


def _check_fields(budget: Budget, program: Program, seen: DryRun, options: TrainOptions) -> None:
    """Raise InputError where a condition or a callback goes by a field that no record has, or nobody says when."""
    fields = ["train_loss", "updates", "gradients", "time_s", "threshold", "staleness_mean"]
    if program.test is not None:
        fields += ["test_loss", *(f"test_{name}" for name in seen.metrics)]
    if options.noise_scale:
        fields += STATISTICS
    named = [] if budget.until is None else [("until=", budget.until.field)]
    named += [("EarlyStopping", each.field) for each in options.callbacks if isinstance(each, EarlyStopping)]
    for where, field in named:
        if field not in fields:
            raise unknown(f"history field in {where}", field, fields)
    if budget.amount is None and options.until is not None and options.evaluate_every is None:
        raise InputError(
            f"until={options.until!r} alone does not say how often to evaluate; write evaluate_every=1 (seconds)"
        )
