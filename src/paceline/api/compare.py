"""compare: several strategies from the same start, with the same data, under the same budget."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.api.train import check, opened, resolve_auto, train
from paceline.comparison import Comparison, find_baseline, load_comparison, run_folder
from paceline.core.errors import InputError, PacelineError
from paceline.core.program_import import refuse_while_importing
from paceline.core.safe_files import check_out, reserved
from paceline.engine.base import Engine
from paceline.engine.run_context import is_main
from paceline.program import Program
from paceline.run import Run, require_package
from paceline.strategy import Strategy, is_auto
from paceline.train_options import TrainOptions

__all__ = ["Comparison", "compare", "load_comparison"]


def compare(
    program: Program,
    strategies: Sequence[Strategy | str],
    *,
    engine: str | Engine = "local",
    rounds: int = 1,
    baseline: Strategy | str | None = None,
    progress: bool | None = None,
    out: str | Path | None = None,
    tensorboard: bool = False,
    **budget: Any,
) -> Comparison:
    """Train a program under each strategy in turn, round after round.

    Round r starts every strategy from the same A_0 and feeds it the same data, both from ``program.seed + r``. With
    ``out``, each run is saved as soon as it ends. Ctrl-C ends the comparison: complete runs count; the run that was
    interrupted had less time and does not count, but is saved next to them, for instance as ``round-0-interrupted``.

    Args:
        program: model, loss, optimizer and data.
        strategies: at least one, no two alike; all that combine several Δs must do it by one rule. ``auto`` among them
            is chosen first, as ``train`` does; if the choice is one of the others, it is compared once.
        engine: name of an engine, or an open engine.
        rounds: number of runs of each strategy.
        baseline: strategy from which differences are taken; None: the first.
        progress: show a live display; None: if stderr is a terminal.
        out: folder to save to; it must not exist.
        tensorboard: also write TensorBoard events to ``out``.
        budget: other keyword arguments of ``train``: ``seconds=``, ``evaluate_every=``, ``delay=``, …

    Returns:
        The comparison of all complete runs.

    Raises:
        InputError: something can't be done as written; nothing was started.
        PacelineError: two strategies of a round did not start from the same A_0.
        KeyboardInterrupt: Ctrl-C before any run was complete.
    """
    refuse_while_importing("compare")
    if budget.get("checkpoint") is not None:
        raise InputError(
            "checkpoint= is the folder of one run, but compare makes several; write out= to have each saved when it is "
            "complete, or train(…, checkpoint=…) for each"
        )
    if not isinstance(strategies, str) and (auto := [each for each in [*strategies, baseline] if is_auto(each)]):
        with opened(engine) as planning:
            best = Strategy.coerce(resolve_auto(program, auto[0], planning, TrainOptions(**budget), progress))
        # Once, also if the choice is one of the other strategies.
        others = [str(Strategy.coerce(each)) for each in strategies if not is_auto(each)]
        strategies = [best if is_auto(s) else s for s in strategies if not (is_auto(s) and str(best) in others)]
        baseline = best if is_auto(baseline) else baseline
    TrainOptions.of("compare", budget)
    chosen = _checked(strategies)
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise InputError(f"rounds={rounds!r} must be a whole number, at least 1; write rounds=1")
    against = next(iter(chosen)) if baseline is None else find_baseline(str(baseline), list(chosen))
    if tensorboard:
        require_package("tensorboard", "tensorboard=True")
    if out is not None:
        check_out(out)
    elif tensorboard:
        raise InputError("tensorboard=True writes next to the saved runs; write out='runs/c' too")
    # All strategies are checked before the first is trained.
    for strategy in chosen.values():
        check(program, strategy, engine=engine, **budget)
    with opened(engine) as engine, ExitStack() as closing:
        folder = closing.enter_context(reserved(out)) if out is not None and is_main(engine.name) else None
        running = RunningComparison(against, folder, tensorboard, {text: [] for text in chosen})
        signal = running.run(program, chosen, engine, rounds, budget | {"progress": progress})
    if not any(running.runs.values()):
        raise KeyboardInterrupt("no run was complete")
    return Comparison(running.runs, against, signal)


@dataclass(frozen=True)
class RunningComparison:
    """Comparison in progress: complete runs by strategy, each saved at once if there is a folder."""

    baseline: str
    folder: Path | None
    tensorboard: bool
    runs: dict[str, list[Run]]

    def run(
        self, program: Program, strategies: dict[str, Strategy], engine: Engine, rounds: int, options: dict[str, Any]
    ) -> str | None:
        """Make all runs; return the name of the signal that ended them, if one did."""
        for number in range(rounds):
            # Rounds are the outer loop: a disturbance of the machine affects all strategies of a round alike, and
            # Ctrl-C leaves as many runs of each.
            job = program.seeded(program.seed + number)
            for index, (text, strategy) in enumerate(strategies.items()):
                try:
                    run = train(job, strategy, engine=engine, **options)
                except KeyboardInterrupt:
                    return "SIGINT"
                interrupted = bool(run.summary["interrupted"])
                if not interrupted:
                    self.runs[text].append(run)
                if self.folder is not None:
                    path = self.folder / run_folder(index, text, number)
                    path = path.with_name(f"{path.name}-interrupted") if interrupted else path
                    run.save(path, tensorboard=self.tensorboard)
                    if not interrupted:
                        Comparison(self.runs, self.baseline).write(self.folder)
                if interrupted:
                    return run.summary.get("signal") or "SIGINT"
            # Different starts would be compared instead of strategies.
            digests = {text: runs[number].summary["start_digest"] for text, runs in self.runs.items()}
            if len(set(digests.values())) > 1:
                raise PacelineError(
                    f"round {number} did not start all strategies from the same A_0; their digests: {digests}"
                )
        return None


def _checked(strategies: Sequence[Strategy | str]) -> dict[str, Strategy]:
    """Return the strategies by their text; refuse equal ones, and different rules of combining: ``sum`` multiplies the
    learning rate of ``mean``, which alone would decide a comparison."""
    if isinstance(strategies, str) or not strategies:
        raise InputError(f"strategies={strategies!r} must be a list of at least one; write ['replicas=8']")
    chosen: dict[str, Strategy] = {}
    rules: dict[str, str] = {}
    for strategy in map(Strategy.coerce, strategies):
        text, policy = str(strategy), strategy.aggregation
        if text in chosen:
            raise InputError(f"strategy {text!r} is given twice; write it once, and rounds=2 to run it twice")
        chosen[text] = strategy
        # A policy that wraps another one (``over``) combines by the rule of that one.
        if rule := getattr(getattr(policy, "over", policy), "combine", None):
            rules.setdefault(rule, text)
    if len(rules) > 1:
        (one, first), (other, second) = list(rules.items())[:2]
        raise InputError(
            f"{first!r} combines by {one} and {second!r} by {other}, but a comparison uses one rule for all its "
            f"strategies; write combine={one} in both"
        )
    return chosen
