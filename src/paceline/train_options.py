"""The words of a run, and every refusal: what can't be done is said here, before anything starts."""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

from torch.utils.data import DataLoader

from paceline import support
from paceline.aggregation import text_of
from paceline.clock.times import Delay, Times
from paceline.core.delta import Gradient
from paceline.core.errors import InputError, unknown
from paceline.core.records import STATISTICS
from paceline.core.types import Seconds
from paceline.engine.base import Budget, BudgetUnit, Condition, Engine, Job, OnNonFinite
from paceline.engine.dry_run import DryRun, dry_run
from paceline.engine.run_context import first_batch
from paceline.program import Program, is_source
from paceline.strategy import Strategy
from paceline.support import Case

V = TypeVar("V", Delay, Times)

_EXAMPLES = {"delay": "fraction=0.5 normal:mean=0,std=0.25", "times": "compute=0.01 transfer=0 apply=0 gradient=0"}

_OURS = ("batch_sampler", "batch_size", "drop_last", "sampler", "shuffle")
"""What DataLoader could be told, but the program's batch size and seed say already."""

POINTS = 20
"""Evaluation points over a budget, beside the one at its start, where ``evaluate_every`` is not given."""


@dataclass(frozen=True)
class TrainOptions:
    """What :func:`~paceline.api.train.train` is told of a run, beside program, strategy and engine; see there."""

    steps: int | None = None
    epochs: float | None = None
    seconds: Seconds | None = None
    until: str | None = None
    evaluate_every: float | None = None
    delay: Delay | str | None = None
    times: Times | str | None = None
    trace: bool = False
    on_nonfinite: OnNonFinite = "stop"
    timeout_s: Seconds = 60.0
    loop: Callable[[Any], None] | None = None
    noise_scale: bool = False

    def budget(self) -> Budget:
        """How long the run may take; raises InputError where that is not said, or said twice."""
        units: tuple[BudgetUnit, ...] = get_args(BudgetUnit)
        given: dict[BudgetUnit, float] = {u: a for u in units if (a := getattr(self, u)) is not None}
        unit: BudgetUnit
        if len(given) > 1 or not (given or self.until):
            raise InputError(
                f"a run needs one budget, but has {' and '.join(f'{u}={a}' for u, a in given.items()) or 'none'}; "
                "write seconds=60, or steps=, or epochs=, or until="
            )
        unit, amount = next(iter(given.items())) if given else ("seconds", None)
        for name, value in (*given.items(), ("evaluate_every", self.evaluate_every)):
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise InputError(f"{name}={value!r} must be a number above 0; write {name}=10")
        if self.steps is not None and self.steps != int(self.steps):
            raise InputError(f"steps={self.steps} must be a whole number; write steps={max(1, round(self.steps))}")
        every = self.evaluate_every or (amount / POINTS if amount is not None else None)
        if every is None:
            raise InputError(f"until={self.until!r} alone says not how often to look; write evaluate_every=1 (seconds)")
        return Budget(unit, amount, every, _condition(self.until) if self.until is not None else None)


def job_of(program: Program, strategy: Strategy | str, engine: Engine, settings: TrainOptions) -> Job:
    """The job that these words mean, every refusal made."""
    if not isinstance(program, Program):
        raise InputError(f"program is {type(program).__name__}, not a Program; write paceline.Program(model=…, …)")
    strategy = Strategy.coerce(strategy)
    if not isinstance(strategy, Strategy):
        raise InputError(f"strategy is {type(strategy).__name__}, not a Strategy or its text; write 'replicas=4'")
    _refuse_settings(settings)
    support.refuse(
        Case.of(
            strategy,
            engine.name,
            engine.features,
            clip_norm=program.clip_norm,
            on_nonfinite=settings.on_nonfinite,
            noise_scale=settings.noise_scale,
            times=settings.times is not None,
        )
    )
    if strategy.pipelined:
        strategy.order.refuse(strategy.stage_count, strategy.micro_batch_count)
    budget = settings.budget()
    _refuse_data(program, strategy, budget)
    draft = Job(program, strategy, budget)
    seen = dry_run(program, first_batch(draft))
    _refuse_condition(budget, program, seen, settings)
    _refuse_writing(strategy, seen)
    aggregation = strategy.aggregation.resolved(learning_rate=seen.learning_rate, replicas=strategy.replicas)
    job = replace(
        draft,
        program=replace(program, metrics=seen.metrics),
        strategy=replace(strategy, aggregation=aggregation),
        running_buffers=seen.running_buffers,
        delay=_read(Delay, "delay", settings.delay),
        times=_read(Times, "times", settings.times),
        trace=settings.trace,
        on_nonfinite=settings.on_nonfinite,
        timeout_s=settings.timeout_s,
        loop=settings.loop,
        noise_scale=settings.noise_scale,
    )
    engine.refuse(job)
    return job


def _read(kind: type[V], name: str, given: V | str | None) -> V | None:
    if isinstance(given, str):
        return kind.parse(given)
    if given is not None and not isinstance(given, kind):
        raise InputError(f"{name}={given!r} is no {kind.__name__} and no text; write {name}='{_EXAMPLES[name]}'")
    return given


def _refuse_settings(settings: TrainOptions) -> None:
    """Raise InputError where an option has a value that it can't have."""
    if settings.on_nonfinite not in get_args(OnNonFinite):
        raise unknown("on_nonfinite", str(settings.on_nonfinite), get_args(OnNonFinite))
    if not (_is_number(settings.timeout_s) and settings.timeout_s > 0):
        raise InputError(f"timeout_s={settings.timeout_s!r} must be a number of seconds above 0; write timeout_s=60")
    if not isinstance(settings.noise_scale, bool):
        raise InputError(f"noise_scale={settings.noise_scale!r} is True or False; write noise_scale=True")


def _refuse_loader(program: Program) -> None:
    known = inspect.signature(DataLoader.__init__).parameters.keys() - {"self", "dataset", *_OURS}
    for name in program.loader:
        if name in _OURS:
            raise InputError(
                f"loader={{{name!r}: …}}: which samples make a batch is said by batch_size= and seed=; leave {name} out"
            )
        if name not in known:
            raise unknown("option of loader=", name, known)


def _refuse_data(program: Program, strategy: Strategy, budget: Budget) -> None:
    _refuse_loader(program)
    if not is_source(program.train):
        return
    if budget.unit == "epochs" and budget.amount is not None:
        raise InputError(
            "epochs= needs a training set of known length, but train= is a function; write steps= or seconds="
        )
    if strategy.partition != "global":
        raise InputError(
            f"partition={strategy.partition} needs a training set to divide, but train= is a function, which divides "
            "by itself; leave partition out"
        )
    if program.global_batch_size is not None:
        raise InputError(
            "global_batch_size= has no say where train= is a function, which makes the batches; leave it out"
        )


def _condition(text: str) -> Condition:
    """``test_accuracy>=0.97`` as a value.

    >>> _condition("train_loss <= 0.1")
    Condition(field='train_loss', above=False, bound=0.1)
    """
    found = re.fullmatch(r"\s*(\w+)\s*(>=|<=)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*", str(text))
    if found is None or found[3].count(".") > 1:
        raise InputError(f"until={text!r} is no condition; write until='test_accuracy>=0.97'")
    return Condition(found[1], found[2] == ">=", float(found[3]))


def _refuse_writing(strategy: Strategy, seen: DryRun) -> None:
    """A replica that sends gradients computes from an A that others read as well."""
    if seen.written and isinstance(strategy.aggregation.delta, Gradient):
        raise InputError(
            f"the model writes its parameter {seen.written[0]} in forward or backward (an Embedding with max_norm=, "
            f"a clamp_?), but under aggregation={text_of(strategy.aggregation)} replicas only read A; do it to a copy "
            "in forward, or write aggregation=local-steps:period=1, where each replica has parameters of its own"
        )


def _refuse_condition(budget: Budget, program: Program, seen: DryRun, settings: TrainOptions) -> None:
    if budget.until is None:
        return
    known = ["train_loss", "updates", "gradients", "time_s", "threshold", "staleness_mean"]
    if program.test is not None:
        known += ["test_loss", *(f"test_{name}" for name in seen.metrics)]
    if settings.noise_scale:
        known += STATISTICS
    if budget.until.field not in known:
        raise unknown("history field in until=", budget.until.field, known)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
