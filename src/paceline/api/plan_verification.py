"""Plans verified by short runs: each is trained for some steps, in turns, and compared with its prediction.

::

    round 0    plan 1 | plan 2 | plan 1, compiled | plan 1, graph        a disturbance of the machine affects all alike
    round 1    plan 1, graph | plan 1, compiled | plan 2 | plan 1
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, TypeAlias, cast

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.base import Plan
from paceline.program import Data, Program, is_source, length
from paceline.progress import measuring
from paceline.run import Run
from paceline.train_options import TrainOptions

# Trains a program by a strategy: what is to be measured.
Train: TypeAlias = Callable[..., Run]

ROUNDS = 3

# Training time of a run, unless the bounds on its steps make it shorter or longer.
RUN_S: Seconds = 2.0

LEAST_STEPS, MOST_STEPS = 8, 400

# Compiled / plain seconds of a step up to which compile= is chosen: a smaller gain is less than runs differ by.
PAYS = 0.95

# Expected seconds of a run from which the choice measures that: to compile and to run in turns takes a minute or two.
WORTH_TRYING_S: Seconds = 1200.0


@dataclass(frozen=True)
class Verified:
    """A plan with the measured time and memory of its runs."""

    plan: Plan
    steps_s: tuple[Seconds, ...]
    """Median time of a step, of each run."""
    held_bytes: tuple[int, ...] = ()
    """Largest memory of a worker, of each run."""
    plain: "Verified | None" = None
    """Of a compiled plan: the same one as it is, which is what was predicted."""
    note: str = ""
    """What could not be run."""

    @property
    def step_s(self) -> Seconds:
        """Median over the runs."""
        return median(self.steps_s)

    @property
    def ratio(self) -> float:
        """Measured / predicted seconds of a step."""
        return self.step_s / self.plan.cost.step_s

    @property
    def memory_ratio(self) -> float | None:
        """Measured / predicted bytes; None: memory was not measured."""
        return median(self.held_bytes) / self.plan.cost.peak.total if self.held_bytes else None

    @property
    def pays(self) -> bool:
        """Return whether it is a compiled plan whose step is shorter than the plain one's, by more than runs differ."""
        return self.plain is not None and self.step_s <= PAYS * self.plain.step_s

    def __str__(self) -> str:
        predicted, runs = self.plan.cost.step_s * 1e3, len(self.steps_s)
        lowest, highest = min(self.steps_s) * 1e3, max(self.steps_s) * 1e3
        memory = "" if self.memory_ratio is None else f"; memory {self.memory_ratio:.2f} times"
        measured = f"measured {self.step_s * 1e3:.3g} ms ({lowest:.3g} to {highest:.3g} in {runs} runs)"
        if self.plain is not None:
            pays = "pays" if self.pays else "does not pay"
            ratio = self.step_s / self.plain.step_s
            return f"verified {self.plan.strategy}: {measured}, {ratio:.2f} times the plain one's: to compile {pays}"
        note = f"; {self.note}" if self.note else ""
        return (
            f"verified {self.plan.strategy}: predicted {predicted:.3g} ms, {measured}, {self.ratio:.2f} times{memory}"
            f"{note}"
        )


def verify(train: Train, plans: Sequence[Plan], program: Program, *, progress: bool | None = None) -> list[Verified]:
    """Run plans in turns, and the best of them compiled as well, and as a graph of operators where it can be one.

    Args:
        train: :func:`paceline.train`, which chooses strategies by what is measured here.
        plans: plans with strategies, the best first.
        program: program to train; it is not evaluated.
        progress: show progress; None: if stderr is a terminal.

    Returns:
        The plans in their order, then the best one as each value of ``compile`` has it that can be run; why others
        can't is a note of the first.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    if not plans:
        return []
    best = plans[0]
    assert best.strategy is not None, "a plan that is not supported can't be run"
    others, notes = list[Plan](), list[str]()
    values: tuple[bool | Literal["graph"], ...] = (True,) if best.strategy.spread else (True, "graph")
    for value in values:
        compiled = replace(best, strategy=replace(best.strategy, compile=value))
        try:
            run_in_turns(train, [compiled], program, rounds=1, progress=progress)  # what torch keeps is there then
        except InputError as error:
            notes.append(f"compile={str(value).lower()} can't be run: {error}")
        else:
            others.append(compiled)
    found = run_in_turns(train, [*plans, *others], program, progress=progress)
    first, count = replace(found[0], note="; ".join(notes)), len(plans)
    return [first, *found[1:count], *(replace(each, plain=first) for each in found[count:])]


def compiled_if_it_pays(
    train: Train, plan: Plan, program: Program, options: TrainOptions, progress: bool | None
) -> Verified | None:
    """Return what was measured of a plan that is to be compiled; None: it is not, or the run is too short to try."""
    if (seconds := expected_s(plan, program, options)) is None or seconds < WORTH_TRYING_S:
        return None
    _, *compiled = verify(train, [plan], program, progress=progress)
    quickest = min(compiled, key=lambda each: each.step_s, default=None)
    return quickest if quickest is not None and quickest.pays else None


def expected_s(plan: Plan, program: Program, options: TrainOptions) -> Seconds | None:
    """Return the predicted seconds of a run; None: nobody can say."""
    if options.seconds is not None:
        return options.seconds
    if options.steps is not None:
        return options.steps * plan.cost.step_s
    if options.epochs is None or is_source(program.train):
        return None
    return options.epochs * length(cast(Data, program.train)) / plan.samples_per_s


def run_in_turns(
    train: Train, plans: Sequence[Plan], program: Program, *, rounds: int = ROUNDS, progress: bool | None = None
) -> list[Verified]:
    """Run each plan once per round, in the opposite order in every other round.

    Args:
        train: as above.
        plans: plans with strategies.
        program: program to train; it is not evaluated.
        rounds: number of runs of each plan.
        progress: show progress; None: if stderr is a terminal.

    Returns:
        The plans in their order, with what was measured.

    Raises:
        KeyboardInterrupt: Ctrl-C, which a single run would take for its regular end.
    """
    runs: list[list[Run]] = [[] for _ in plans]
    unscored, done = replace(program, test=None, metrics={}), 0
    with measuring(progress, f"{program.name}: verifying") as report:
        for turn in range(rounds):
            # Forth and back, so that no plan is always the first on a machine that is getting warmer or busier.
            for number in range(len(plans))[:: -1 if turn % 2 else 1]:
                plan = plans[number]
                assert plan.strategy is not None, "a plan that is not supported can't be run"
                report(str(plan.strategy), done / (rounds * len(plans)))
                steps = steps_of(plan)
                run = train(unscored, plan.strategy, steps=steps, evaluate_every=steps, progress=False)
                # A single run returns after Ctrl-C; here Ctrl-C ends all runs.
                if run.summary["interrupted"]:
                    raise KeyboardInterrupt
                runs[number].append(run)
                done += 1
    return [
        Verified(
            plan,
            tuple(run.summary["step_time_s"] for run in own),
            tuple(max(run.summary["peak_memory_bytes"]) for run in own),
        )
        for plan, own in zip(plans, runs, strict=True)
    ]


def steps_of(plan: Plan) -> int:
    """Return the number of steps of a run, of which the second half is measured."""
    return max(LEAST_STEPS, min(MOST_STEPS, round(RUN_S / plan.cost.step_s)))
