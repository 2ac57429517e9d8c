"""Plans verified by short runs: each is trained for some steps, in turns, and compared with its prediction.

::

    round 0    plan 1 | plan 2 | plan 3        a disturbance of the machine affects all plans alike
    round 1    plan 3 | plan 2 | plan 1
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from paceline.api.train import train
from paceline.core.types import Seconds
from paceline.planner.base import Plan
from paceline.program import Program
from paceline.progress import measuring
from paceline.run import Run

ROUNDS = 3

# Training time of a run, unless the bounds on its steps make it shorter or longer.
RUN_S: Seconds = 2.0

LEAST_STEPS, MOST_STEPS = 8, 400


@dataclass(frozen=True)
class Verified:
    """A plan with the measured time and memory of its runs."""

    plan: Plan
    steps_s: tuple[Seconds, ...]
    """Median time of a step, of each run."""
    held_bytes: tuple[int, ...] = ()
    """Largest memory of a worker, of each run."""

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
    """Run each plan once per round, in the opposite order in every other round.

    Args:
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
