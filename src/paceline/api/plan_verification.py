"""Plans held to short runs: each is trained for some steps, in turns, and laid beside what was foretold.

::

    round 0    plan 1 | plan 2 | plan 3        what disturbs the machine for a while disturbs all alike
    round 1    plan 3 | plan 2 | plan 1
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from paceline.api.train import open_engine, train
from paceline.core.types import Seconds
from paceline.planner.base import Plan
from paceline.program import Program
from paceline.progress import measuring
from paceline.run import Run

ROUNDS = 3

RUN_S: Seconds = 2.0
"""A run is to train for so long, if it makes that in the steps it may take."""

LEAST_STEPS, MOST_STEPS = 8, 400


@dataclass(frozen=True)
class Verified:
    """A plan beside what it took."""

    plan: Plan
    steps_s: tuple[Seconds, ...]
    """Of each run the median of a step."""
    held_bytes: tuple[int, ...] = field(default=())
    """Of each run what the worker held that held most."""

    @property
    def step_s(self) -> Seconds:
        """The median of the runs."""
        return median(self.steps_s)

    @property
    def ratio(self) -> float:
        """Measured / predicted seconds of a step."""
        return self.step_s / self.plan.cost.step_s

    @property
    def memory_ratio(self) -> float | None:
        """Measured / predicted bytes; None: it was not measured."""
        return median(self.held_bytes) / self.plan.cost.peak.total if self.held_bytes else None

    def __str__(self) -> str:
        predicted, runs = self.plan.cost.step_s * 1e3, len(self.steps_s)
        lowest, highest = min(self.steps_s) * 1e3, max(self.steps_s) * 1e3
        memory = "" if self.memory_ratio is None else f"; memory {self.memory_ratio:.2f} times"
        return (
            f"verified {self.plan.strategy}: predicted {predicted:.3g} ms, measured {self.step_s * 1e3:.3g} ms "
            f"({lowest:.3g} to {highest:.3g} in {runs} runs), {self.ratio:.2f} times{memory}"
        )


def run_in_turns(
    plans: Sequence[Plan], program: Program, *, rounds: int = ROUNDS, progress: bool | None = None
) -> list[Verified]:
    """Run each plan once a round.

    Args:
        plans: with strategies.
        program: what they are for; it is not scored.
        rounds: how often.
        progress: whether to draw how far it is; None: where stderr is a terminal.

    Raises:
        KeyboardInterrupt: on Ctrl-C, which a run takes for its end.
    """
    found: dict[int, list[Run]] = {number: [] for number in range(len(plans))}
    bare, done = _unscored(program), 0
    with measuring(progress, f"{program.name}: verifying") as tell:
        for turn in range(rounds):
            for number in list(found)[:: -1 if turn % 2 else 1]:
                tell(str(plans[number].strategy), done / (rounds * len(plans)))
                found[number].append(_run(plans[number], bare))
                done += 1
    return [Verified(plan, *_figures(found[number])) for number, plan in enumerate(plans)]


def steps_of(plan: Plan) -> int:
    """Of a run: as many as take about two seconds, of which half count."""
    return max(LEAST_STEPS, min(MOST_STEPS, round(RUN_S / plan.cost.step_s)))


def _run(plan: Plan, program: Program) -> Run:
    assert plan.strategy is not None, "what is not carried is not run"
    steps = steps_of(plan)
    with open_engine("local") as engine:
        run = train(program, plan.strategy, engine=engine, steps=steps, evaluate_every=steps, progress=False)
    if run.summary["interrupted"]:
        raise KeyboardInterrupt
    return run


def _unscored(program: Program) -> Program:
    return replace(program, test=None, metrics={})


def _figures(runs: Sequence[Run]) -> tuple[tuple[Seconds, ...], tuple[int, ...]]:
    seconds = tuple(run.summary["step_time_s"] for run in runs)
    return seconds, tuple(max(run.summary["peak_memory_bytes"]) for run in runs)
