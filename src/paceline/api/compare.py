"""compare: several strategies from the same starts, with the same data, under the same budget."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from paceline.api.train import check, open_engine, resolved, train
from paceline.comparison import Comparison, find_baseline, load_comparison, run_folder
from paceline.core.errors import InputError, PacelineError
from paceline.engine.base import Engine
from paceline.engine.run_context import is_main
from paceline.program import Program
from paceline.run import Run, check_out, require_tensorboard
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
    ``out``, each run is saved as soon as it is made. Ctrl-C ends the comparison: the runs that are complete count, the
    one that it hit had less time and does not, but is saved beside them, as ``round-0-interrupted`` say. Where none is
    complete, KeyboardInterrupt goes on.

    Args:
        program: what is trained.
        strategies: at least one, no two alike; all that combine several Δs must do it by one rule. ``auto`` among them
            is chosen first, as ``train`` does; where it is one of the others, it is compared once.
        engine: its name, or an open one.
        rounds: how often each strategy is run.
        baseline: which strategy the others are held against; the first where absent.
        progress: whether to draw a live display; None: where stderr is a terminal.
        out: a folder to save to; it must not exist.
        tensorboard: also write TensorBoard events to it.
        budget: what ``train`` takes besides: ``seconds=``, ``evaluate_every=``, ``delay=``, …

    Raises:
        InputError: something can't be done as written; nothing has been started then.
        PacelineError: two strategies of a round did not start from the same A_0.
    """
    strategies, baseline = _resolved(program, strategies, baseline, engine, budget, progress)
    chosen = _distinct(strategies)
    _check_rounds(rounds)
    _check_combine(chosen)
    against = next(iter(chosen)) if baseline is None else find_baseline(str(baseline), list(chosen))
    _check_out(out, tensorboard)
    for strategy in chosen.values():
        check(program, strategy, engine=engine, **budget)
    with _opened(engine) as opened:
        folder = Path(out) if out is not None and is_main(opened.name) else None
        book = Book(list(chosen), against, folder, tensorboard=tensorboard)
        complete = _fill(book, program, chosen, opened, rounds, budget | {"progress": progress})
    return book.comparison(interrupted=not complete)


def _fill(
    book: "Book",
    program: Program,
    strategies: dict[str, Strategy],
    engine: Engine,
    rounds: int,
    options: dict[str, Any],
) -> bool:
    """Make all runs; False where Ctrl-C ended them."""
    for number in range(rounds):
        job = program.seeded(program.seed + number)
        for text, strategy in strategies.items():
            try:
                run = train(job, strategy, engine=engine, **options)
            except KeyboardInterrupt:
                return False
            book.add(text, run)
            if run.summary["interrupted"]:
                return False
        _check_starts(number, {text: made[number] for text, made in book.runs.items()})
    return True


class Book:
    """The runs of a comparison as they come, each saved at once where there is a folder.

    Args:
        strategies: their texts.
        baseline: one of them.
        folder: to make and fill; None: nothing is saved.
        tensorboard: also write events.
    """

    def __init__(self, strategies: Sequence[str], baseline: str, folder: Path | None, *, tensorboard: bool) -> None:
        self.runs: dict[str, list[Run]] = {text: [] for text in strategies}
        self._baseline, self._folder, self._tensorboard = baseline, folder, tensorboard

    def add(self, text: str, run: Run) -> None:
        """One more run; one that was interrupted is saved, but does not count."""
        number, index = len(self.runs[text]), list(self.runs).index(text)
        complete = not run.summary["interrupted"]
        if complete:
            self.runs[text].append(run)
        if self._folder is not None:
            place = self._folder / run_folder(index, text, number)
            run.save(place if complete else place.with_name(f"{place.name}-interrupted"), tensorboard=self._tensorboard)
            if complete:
                Comparison(self.runs, self._baseline).write(self._folder)

    def comparison(self, *, interrupted: bool) -> Comparison:
        """What has been compared; raises KeyboardInterrupt where no run is complete."""
        if not any(self.runs.values()):
            raise KeyboardInterrupt("no run was complete")
        return Comparison(self.runs, self._baseline, interrupted=interrupted)


def _resolved(
    program: Program,
    strategies: Sequence[Strategy | str],
    baseline: Strategy | str | None,
    engine: str | Engine,
    budget: dict[str, Any],
    progress: bool | None,
) -> tuple[Sequence[Strategy | str], Strategy | str | None]:
    """With the one that is chosen in place of ``auto``."""
    if isinstance(strategies, str) or not any(is_auto(each) for each in [*strategies, baseline]):
        return strategies, baseline
    with _opened(engine) as opened:
        auto = next(each for each in [*strategies, baseline] if is_auto(each))
        chosen = Strategy.coerce(resolved(program, auto, opened, TrainOptions(**budget), progress))
    others = [str(Strategy.coerce(each)) for each in strategies if not is_auto(each)]
    kept = [chosen if is_auto(each) else each for each in strategies if not (is_auto(each) and str(chosen) in others)]
    return kept, chosen if is_auto(baseline) else baseline


def _opened(engine: str | Engine) -> AbstractContextManager[Engine]:
    return nullcontext(engine) if isinstance(engine, Engine) else open_engine(engine)


def _distinct(strategies: Sequence[Strategy | str]) -> dict[str, Strategy]:
    if isinstance(strategies, str) or not strategies:
        raise InputError(f"strategies={strategies!r} must be a list of at least one; write ['replicas=8']")
    parsed = [Strategy.coerce(strategy) for strategy in strategies]
    chosen = {str(strategy): strategy for strategy in parsed}
    if len(chosen) < len(parsed):
        twice = next(text for text in chosen if sum(str(s) == text for s in parsed) > 1)
        raise InputError(f"strategy {twice!r} is given twice; write it once, and rounds=2 to run it twice")
    return chosen


def _check_rounds(rounds: int) -> None:
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise InputError(f"rounds={rounds!r} must be a whole number, at least 1; write rounds=1")


def _check_out(out: str | Path | None, tensorboard: bool) -> None:
    if tensorboard:
        require_tensorboard()
    if out is not None:
        check_out(out)
    elif tensorboard:
        raise InputError("tensorboard=True writes beside the saved runs; write out='runs/c' too")


def _check_combine(strategies: dict[str, Strategy]) -> None:
    """One rule for all: ``sum`` multiplies the learning rate of ``mean``, and that alone would decide a comparison.

    A policy that combines by another one (``over``) has its rule.
    """
    rules: dict[str, str] = {}
    for text, strategy in strategies.items():
        policy = strategy.aggregation
        if rule := getattr(getattr(policy, "over", policy), "combine", None):
            rules.setdefault(rule, text)
    if len(rules) > 1:
        (one, first), (other, second) = list(rules.items())[:2]
        raise InputError(
            f"{first!r} combines by {one} and {second!r} by {other}, but a comparison uses one rule for all its "
            f"strategies; write combine={one} in both"
        )


def _check_starts(number: int, runs: dict[str, Run]) -> None:
    digests = {text: run.summary["start_digest"] for text, run in runs.items()}
    if len(set(digests.values())) > 1:
        raise PacelineError(f"round {number} did not start all strategies from the same A_0; their digests: {digests}")
