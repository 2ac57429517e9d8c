"""Updates of parameters by importance and dependency: optimum, divergence, updates needed, factorisation; jobs.

    python benchmarks/scheduling/measure.py           # all rows, three quarters of an hour
    python benchmarks/scheduling/measure.py --page

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jobs
import numpy as np
from kit.machine import described, machine
from kit.sheet import Row, Sheet
from kit.words import grid
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Lasso as Reference

from paceline import Lasso, MatrixFactorization, NonFiniteError, ScheduledRun, schedule_parameters
from paceline.parameter_scheduling.base import ScheduledProgram
from paceline.parameter_scheduling.schedulers import balanced

HERE = Path(__file__).parent
SEEDS = range(5)
NEAR = {"1e-4": 1e-4, "1e-6": 1e-6}
PASSES = 100
"""As many updates of each coefficient at the most."""


# ------------------------------------------------------------------------------------------------------- the problems


@dataclass(frozen=True)
class Design:
    """A Lasso with coefficients ±10·k^-power in random places.

    Columns have unit norm, and come in groups, inside of which each two have this correlation, but for chance.
    """

    rows: int
    columns: int
    share: float
    """λ by the least λ for which β = 0."""
    power: float = 1.0
    correlation: float = 0.0
    group: int = 1

    def problem(self, seed: int) -> tuple[Lasso, Any, float]:
        """Return the program, scikit-learn's coefficients and their objective."""
        rng = np.random.default_rng(seed)
        own = rng.standard_normal((self.rows, self.columns))
        common = np.repeat(rng.standard_normal((self.rows, -(-self.columns // self.group))), self.group, axis=1)
        matrix = np.sqrt(1 - self.correlation) * own + np.sqrt(self.correlation) * common[:, : self.columns]
        true = rng.permutation(10.0 * np.arange(1, self.columns + 1) ** -self.power)
        true *= rng.choice([-1, 1], self.columns)
        matrix = standardised(matrix)
        y = matrix @ true + 0.1 * rng.standard_normal(self.rows) / np.sqrt(self.rows)
        return solved(matrix, y - y.mean(), self.share)


def standardised(matrix: Any) -> Any:
    """Columns with mean 0 and norm 1, as the papers have them."""
    centred = matrix - matrix.mean(0)
    return centred / np.linalg.norm(centred, axis=0)


def solved(matrix: Any, y: Any, share: float) -> tuple[Lasso, Any, float]:
    """Return the program, scikit-learn's coefficients and their objective."""
    penalty = share * float(np.abs(matrix.T @ y).max())
    options: dict[str, Any] = {"fit_intercept": False, "tol": 1e-15, "max_iter": 10**6}
    coefficients = Reference(alpha=penalty / len(y), **options).fit(matrix, y).coef_
    rest = y - matrix @ coefficients
    return Lasso(matrix, y, penalty=penalty), coefficients, float(rest @ rest / 2 + penalty * abs(coefficients).sum())


def diabetes() -> tuple[Lasso, Any, float]:
    """442 patients, 10 measurements (Efron et al. 2004), all products of two, and squares: 65 columns."""
    measured, y = load_diabetes(return_X_y=True)
    products = [measured[:, i] * measured[:, j] for i in range(10) for j in range(i, 10) if (i, j) != (1, 1)]
    return solved(standardised(np.column_stack([measured, *products])), y - y.mean(), 0.01)


def ratings(seed: int, rows: int = 300, columns: int = 200, ranks: int = 8) -> MatrixFactorization:
    """A matrix of that many ranks with noise; row i has about columns / (1 + i / 10) known entries."""
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((rows, ranks)) @ (
        rng.standard_normal((ranks, columns)) / np.arange(1, ranks + 1)[:, None]
    )
    whole += 0.1 * rng.standard_normal(whole.shape)
    known = rng.random(whole.shape) < 1 / (1 + np.arange(rows)[:, None] / 10)
    row, column = np.nonzero(known)
    return MatrixFactorization(
        row, column, whole[row, column], shape=(rows, columns), ranks=ranks, penalty=0.5, seed=seed
    )


# ------------------------------------------------------------------------------------------------------- what is found

OPTIMA: dict[str, Callable[[int], tuple[Lasso, Any, float]]] = {
    "500 × 200": Design(500, 200, 0.05).problem,
    "200 × 1,000": Design(200, 1000, 0.1).problem,
    "500 × 200, correlation 0.5": Design(500, 200, 0.05, correlation=0.5, group=200).problem,
    "500 × 200, groups of 10 with correlation 0.9": Design(500, 200, 0.05, correlation=0.9, group=10).problem,
    "diabetes with products, 442 × 64": lambda seed: diabetes(),
}


def optimum(case: str, scheduler: str, seed: int) -> dict[str, Any]:
    """Return how far a run ends from scikit-learn's optimum."""
    program, coefficients, best = OPTIMA[case](seed)
    run = schedule_parameters(program, scheduler, tolerance=1e-15, seed=seed)
    return {
        "objective": run.objective / best - 1,
        "coefficients": float(np.abs(run.values - coefficients).max() / np.abs(coefficients).max()),
        "same_support": bool(np.array_equal(run.values != 0, coefficients != 0)),
        "updates": run.history[-1].updates,
    }


CORRELATED = {
    "groups of 10 with correlation 0.9": Design(400, 200, 0.05, correlation=0.9, group=10),
    "all with correlation 0.5": Design(400, 200, 0.05, correlation=0.5, group=200),
}
AT_ONCE = (1, 4, 8, 16, 32)
CHOOSERS = ("uniform:", "priority:eta=0.1,")


def reached(program: ScheduledProgram[Any], scheduler: str, best: float, seed: int, every: int = 20) -> dict[str, Any]:
    """Return updates and rounds to within 1e-4 and 1e-6 of the optimum; "diverged", or nothing if it took too many."""
    found: dict[str, Any] = {f"{what}_{near}": "" for near in NEAR for what in ("updates", "rounds")}
    try:
        run = schedule_parameters(
            program, scheduler, workers=1, target=best * (1 + 1e-6), tolerance=None, evaluate_every=every,
            updates=PASSES * program.blocks, seed=seed,
        )  # fmt: skip
    except NonFiniteError:
        return dict.fromkeys(found, "diverged")
    if run.objective > run.history[0].objective:  # on its way to infinity
        return dict.fromkeys(found, "diverged")
    for near, share in NEAR.items():
        first = next((each for each in run.history if each.objective <= best * (1 + share)), None)
        if first is not None:
            found |= {f"updates_{near}": first.updates, f"rounds_{near}": first.rounds}
    return found


POWER_LAWS = {
    "k^-1, λ = 0.1": Design(500, 1000, 0.1),
    "k^-2, λ = 0.05": Design(500, 1000, 0.05, power=2.0),
    "k^-1, λ = 0.05": Design(500, 1000, 0.05),
    "k^-1, λ = 0.01": Design(500, 1000, 0.01),
}
CHOICES = (
    "cyclic",
    "uniform",
    "priority",
    "priority:eta=0.1",
    "priority:eta=0.1,power=2",
    "cyclic:at_once=16",
    "uniform:at_once=16",
    "priority:at_once=16",
    "priority:eta=0.1,at_once=16",
)

RANKS = ("cyclic", "uniform", "priority", "priority:at_once=4,bound=none", "priority:at_once=4,bound=0.1")
PASSES_OF_RANKS = (1, 2, 5, 10, 20)


def factorised(scheduler: str, seed: int) -> dict[str, Any]:
    """Return the objective after some passes over the ranks, and rounds."""
    program = ratings(seed)
    try:
        run: ScheduledRun = schedule_parameters(
            program, scheduler, tolerance=None, updates=PASSES_OF_RANKS[-1] * program.blocks,
            evaluate_every=1, seed=seed,
        )  # fmt: skip
    except NonFiniteError:
        return {f"pass_{passes}": "diverged" for passes in PASSES_OF_RANKS} | {"rounds": ""}
    found = {
        f"pass_{passes}": next(e.objective for e in run.history if e.updates >= passes * program.blocks)
        for passes in PASSES_OF_RANKS
    }
    return found | {"rounds": run.history[-1].rounds}


def imbalance(workers: int, seed: int) -> dict[str, Any]:
    """Return the dearest worker's entries by the mean's: by cost as they are divided, and in ranges of rows."""
    costs = ratings(seed).row_costs()
    parts = {"by_cost": balanced(costs, workers), "ranges": np.array_split(np.arange(len(costs)), workers)}
    return {name: max(costs[part].sum() for part in each) * workers / costs.sum() for name, each in parts.items()}


# ------------------------------------------------------------------------------------------------------------ the rows

KEYS = ("side", "case", "seed")


def rows_of(name: str) -> Iterator[tuple[str, str, int, Callable[[], dict[str, Any]]]]:
    """Yield side, case and seed of each row of a table, and what measures it."""
    if name == "optimum":
        for case in OPTIMA:
            for scheduler in ("cyclic", "uniform:at_once=8", "priority:eta=0.1,at_once=8"):
                yield scheduler, case, 0, lambda c=case, s=scheduler: optimum(c, s, 0)
    if name == "jobs":
        for case in jobs.CASES:
            for side in jobs.SIDES:
                for seed in SEEDS:
                    yield side, case, seed, lambda c=case, s=side, n=seed: jobs.shared(c, s, n)
    for seed in SEEDS:
        if name == "dependency":
            for case, design in CORRELATED.items():
                for chooser in CHOOSERS:
                    for at_once in AT_ONCE:
                        for bound in ("none", "0.1"):
                            side = f"{chooser}at_once={at_once},bound={bound}"
                            yield side, case, seed, lambda d=design, s=side, n=seed: near(d, s, n)
        if name == "power_law":
            for case, design in POWER_LAWS.items():
                for side in CHOICES:
                    yield side, case, seed, lambda d=design, s=side, n=seed: near(d, s, n)
        if name == "factorization":
            for side in RANKS:
                yield side, "8 ranks", seed, lambda s=side, n=seed: factorised(s, n)
        if name == "balance":
            for workers in (2, 4, 8, 16):
                yield "division", str(workers), seed, lambda w=workers, n=seed: imbalance(w, n)


TABLES = ("optimum", "dependency", "power_law", "factorization", "balance", "jobs")


def near(design: Design, scheduler: str, seed: int) -> dict[str, Any]:
    """Return what a run needs to come near to the optimum, and how many coefficients are not 0 there."""
    program, coefficients, best = design.problem(seed)
    return reached(program, scheduler, best, seed) | {"nonzero": int((coefficients != 0).sum())}


def measure(sheets: dict[str, Sheet]) -> None:
    """Measure the rows that are not there."""
    for name, sheet in sheets.items():
        for side, case, seed, found in rows_of(name):
            if sheet.find(side, case, seed) is None:
                sheet.put({"side": side, "case": case, "seed": seed} | found() | machine())
                print(name, sheet.find(side, case, seed), flush=True)


# ------------------------------------------------------------------------------------------------------------- the page


def middle(rows: Sequence[Row], side: str, case: str, figure: str) -> float | None:
    """The median of a figure over seeds; infinite for runs that did not get there; None without rows."""
    found = [row[figure] for row in rows if (row["side"], row["case"]) == (side, case)]
    return median(float(f) if f not in ("", "diverged") else float("inf") for f in found) if found else None


def told(rows: Sequence[Row], side: str, case: str, figure: str) -> str:
    """The median in words: how many of the runs diverged, where most did."""
    found = [row[figure] for row in rows if (row["side"], row["case"]) == (side, case)]
    value = middle(rows, side, case, figure)
    if value is None:
        return ""
    if value == float("inf"):
        return "diverged" if found.count("diverged") > len(found) / 2 else f"> {PASSES} passes"
    return f"{value:,.0f}"


def optimum_table(rows: Sequence[Row]) -> str:
    """One row for each design and scheduler."""
    cells = [
        (row["case"], f"`{row['side']}`", f"{float(row['objective']):+.0e}", f"{float(row['coefficients']):.0e}",
         "yes" if row["same_support"] == "True" else "no", f"{int(row['updates']):,}")
        for row in rows
    ]  # fmt: skip
    return grid(("design", "scheduler", "objective", "coefficients", "same zeros", "updates"), cells)


def dependency_table(rows: Sequence[Row], case: str) -> str:
    """Rounds to within 1e-4, with and without the check."""
    lines = []
    for at_once in AT_ONCE:
        sides = [f"{c}at_once={at_once},bound={b}" for c in CHOOSERS for b in ("none", "0.1")]
        lines.append((at_once, *(told(rows, side, case, "rounds_1e-4") for side in sides)))
    return grid(("at once", "uniform", "uniform, checked", "priority (η = 0.1)", "priority, checked"), lines)


def power_law_table(rows: Sequence[Row], near: str) -> str:
    """Updates of each choice, and how many more uniform choice needs than priority."""
    lines = []
    for case in POWER_LAWS:
        counts = [told(rows, side, case, f"updates_{near}") for side in CHOICES]
        uniform, priority = (middle(rows, side, case, f"updates_{near}") for side in ("uniform", "priority"))
        ratio = f"{uniform / priority:.1f}" if uniform and priority and np.isfinite(priority) else ""
        nonzero = middle(rows, "uniform", case, "nonzero")
        lines.append((case, "" if nonzero is None else int(nonzero), *counts, ratio))
    heads = [f"`{side}`" for side in CHOICES]
    return grid(("design", "nonzero", *heads, "uniform / priority"), lines)


def factorization_table(rows: Sequence[Row]) -> str:
    """Objective after passes, by that of the cycle after the last."""
    last = middle(rows, "cyclic", "8 ranks", f"pass_{PASSES_OF_RANKS[-1]}")
    lines = []
    for side in RANKS:
        found = [middle(rows, side, "8 ranks", f"pass_{passes}") for passes in PASSES_OF_RANKS]
        told_of = ["" if f is None or not last else "diverged" if f > 100 * last else f"{f / last:.3f}" for f in found]
        lines.append((f"`{side}`", *told_of, told(rows, side, "8 ranks", "rounds")))
    return grid(("scheduler", *(f"pass {passes}" for passes in PASSES_OF_RANKS), "rounds"), lines)


def balance_table(rows: Sequence[Row]) -> str:
    """The dearest worker by the mean."""
    figures = [(w, *(middle(rows, "division", str(w), how) for how in ("by_cost", "ranges"))) for w in (2, 4, 8, 16)]
    lines = [(w, *("" if f is None else f"{f:.2f}" for f in found)) for w, *found in figures]
    return grid(("workers", "rows by cost", "ranges of rows"), lines)


def page(sheets: dict[str, Sheet], folder: Path) -> None:
    """Write README.md from the rows."""
    rows = {name: sheet.rows for name, sheet in sheets.items()}
    text = TEXT.format(
        optimum=optimum_table(rows["optimum"]),
        groups=dependency_table(rows["dependency"], "groups of 10 with correlation 0.9"),
        all=dependency_table(rows["dependency"], "all with correlation 0.5"),
        near_4=power_law_table(rows["power_law"], "1e-4"),
        near_6=power_law_table(rows["power_law"], "1e-6"),
        factorization=factorization_table(rows["factorization"]),
        balance=balance_table(rows["balance"]),
        unlike=jobs.table(rows["jobs"], "learning rates 0.2 to 0.006"),
        one_slow=jobs.table(rows["jobs"], "learning rate 0.2 for five, 0.006 for one"),
        alike=jobs.table(rows["jobs"], "learning rate 0.05 for all"),
        machine=described([row for each in rows.values() for row in each]),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


TEXT = (HERE / "page.md").read_text(encoding="utf-8")


def main() -> None:
    """Measure, or write the page."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--page", action="store_true", help="write README.md from the rows")
    sheets = {name: Sheet(HERE / "results" / f"{name}.csv", KEYS) for name in TABLES}
    if not made.parse_args().page:
        measure(sheets)
    page(sheets, HERE)


if __name__ == "__main__":
    main()
