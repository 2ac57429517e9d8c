"""The page's parts that are not about one table: assumptions, protocol, sensitivity, engines, commands."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from assumptions import Assumptions
from cells import CHANCE, METRICS, POINTS
from data import RANDOM
from figures import BARS, CURVES, SAID, table_of
from protocol import IMAGE_POINTS, ROUNDS, TABLES, Table
from sensitivity import NUMBERS, Effect
from sheets import read
from study import DEFAULTS, Study

from paceline.engine.evaluation import TRAIN_SAMPLE

SCRIPT = "python benchmarks/smooth_switch/measure.py"

OPEN = {
    "combine": "“synchronize all the gradients in the gradient buffer”: added up or averaged, it does not say",
    "loss": "equation 1 adds up the losses of a batch; PyTorch, which it used, averages them by default",
    "count": "“an increase in the number of gradient updates”: gradients that came in, or updates made of them",
    "initial": "“a very low value”",
    "increment": "“Gradually increase the threshold”; “step size” is said, the height of a step is not",
    "cap": "not said; more than all workers can't be waited for",
    "hold": "whether a worker whose gradient lies in the buffer goes on meanwhile, it does not say",
    "negative": "delays are drawn from N(0, 0.25²), half of which is below zero; what became of those, it does not say",
    "hidden": "the model for the random data is not named",
    "clusters": "“randomly generated” with 20 dimensions and 10 classes; how, it does not say",
    "pixels": "how images were scaled, it does not say; PyTorch's `ToTensor` alone gives 0 to 1",
    "apply_s": "how long its server took for an update (Ray 2.4, 28 cores), it does not say",
    "gradient_s": "nor whether that grew with the gradients in an update",
    "compute_s": "how long its workers took for a gradient, it does not say",
    "rate": "said: 0.01",
    "workers": "said: 25",
}
"""Assumption -> what the paper says about it."""

_CENTRE = {"test_accuracy": "mean", "test_loss": "median", "train_loss": "median"}
"""What is told of the differences; where runs come close to diverging, a few losses would make the whole mean."""

Cells: TypeAlias = Sequence[str]


def assumptions_made(assumptions: Assumptions) -> str:
    """What the paper leaves open, an assumption a row."""
    rows = []
    for field in fields(assumptions):
        default, used = _value(field.default), _value(getattr(assumptions, field.name))
        shown = f"`{used}`" + ("" if used == default else f" (default `{default}`)")
        rows.append((f"`{field.name}`", shown, OPEN[field.name]))
    return "## What the paper leaves open\n\n" + grid(("assumption", "here", "what the paper says"), rows)


def _value(value: Any) -> str:
    return (
        "as measured"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else f"{value}"
    )


def protocol(study: Study) -> str:
    """What all runs share, and what their numbers are taken on."""
    workers = study.assumptions.workers
    return (
        "## Protocol\n\n"
        f"{workers} workers, each with its own subset of the training data; half of them are delayed at every "
        "gradient. A round has one seed: the same initial weights for the three algorithms. Random data are drawn anew "
        "for each configuration.\n\n"
        f"A run is evaluated at its start and then {POINTS} times at even distances on random data, {IMAGE_POINTS} "
        "times on the image sets; a run's number is the mean over its time by the trapezoid rule. Test accuracy and "
        f"test loss are taken on the whole test set, the training loss on {TRAIN_SAMPLE:,} training samples, the same "
        "ones in every run. A run that diverges counts as if it had guessed all the time: "
        f"{CHANCE.test_accuracy:g} points, loss {CHANCE.test_loss:.3f}."
    )


def sensitivity(effects: Sequence[Effect], rounds: int) -> str:
    """The variations whose runs are all there."""
    head = "## What each assumption does\n\n"
    if not effects:
        return f"{head}Its runs have not been made: `{SCRIPT} --sensitivity`."
    rows = [_effect(effect) for effect in effects]
    titles = (
        "changed",
        *(f"table {n}" for n in NUMBERS),
        "together",
        "clearly against",
        *(f"{_CENTRE[metric]} {SAID[metric]}" for metric in METRICS),
        "diverged",
    )
    words = (
        f"Tables {', '.join(map(str, NUMBERS))}, rounds: {rounds}; changed against the defaults: how many entries have "
        "the paper's sign, how many the other one by an interval that leaves 0 out, and the mean or median of all "
        "differences, Smooth Switch minus asynchronous; what is not finite is left out. Gradients take as "
        "long as with the defaults also where the model is another. CSV: [sensitivity](sensitivity.csv)."
    )
    return f"{head}{words}\n\n{grid(titles, rows)}"


def _effect(effect: Effect) -> Cells:
    note = f" ({effect.variation.note})" if effect.variation.note else ""
    centres = [f"{effect.centres[_CENTRE[metric], metric]:+.3f}" for metric in METRICS]
    signs = [str(signs) for signs in effect.signs.values()]
    last = (str(effect.together), str(effect.together.against), *centres, str(effect.diverged))
    return (f"`{effect.variation.change}`{note}", *signs, *last)


def engines(study: Study, done: Sequence[Table], folder: Path) -> str:
    """What lies in ``local/`` and ``ray/``, beside virtual time."""
    rows = [
        row for engine in ("local", "ray") for number in TABLES for row in _engine(study, done, folder, engine, number)
    ]
    if not rows:
        return ""
    titles = ("engine", "table", "workers", "s", "rounds", "signs as in the paper", "signs as in virtual time, above")
    return "## The same on real workers\n\n" + grid(titles, rows)


def _engine(study: Study, done: Sequence[Table], folder: Path, engine: str, number: int) -> Iterator[Cells]:
    path = folder / engine / f"table_{number}.csv"
    if not path.exists():
        return
    rows = read(path)
    same = "not run"
    if TABLES[number] in done:
        ours = {(entry.metric, entry.label): entry.ours for entry in study.entries(TABLES[number])}
        alike = sum(ours[row["metric"], row["label"]] * float(row["ours"]) > 0 for row in rows)
        same = f"{alike} of {len(rows)}"
    paper = f"{sum(row['agrees'] == 'True' for row in rows)} of {len(rows)}"
    yield (
        engine,
        f"[{number}]({engine}/{path.name})",
        *(rows[0][key] for key in ("workers", "seconds", "rounds")),
        paper,
        same,
    )


def commands(study: Study, sensitivity_rounds: int) -> str:
    """What makes each part of the page."""
    how = "" if study.assumptions == DEFAULTS else f' --assume "{study.assumptions}"'
    how += "" if study.rounds == ROUNDS else f" --rounds {study.rounds}"
    how += "" if study.image_rounds in (None, study.rounds) else f" --image-rounds {study.image_rounds}"
    varied = "--sensitivity" + (
        "" if sensitivity_rounds == study.rounds else f" --sensitivity-rounds {sensitivity_rounds}"
    )
    parts = [f"--table all --figure all {varied}{how} --data DATA", "--measure --data DATA"]
    parts += [f"--table {number}{how}{_data(table)}" for number, table in TABLES.items()]
    parts += [f"--figure {number}{how}{_data(table_of(number))}" for number in (*CURVES, *BARS)]
    parts += [f"{varied}{how}", f"--page{how}"]
    return (
        "## Commands\n\nA run is made once and kept in `--cache`; a command that was stopped goes on where it was. "
        "`DATA` is a folder with `mnist/` and `cifar10/` in it. `--measure` times gradients on this machine: where "
        "they take another time than before, all runs are made anew.\n\n"
        + "\n".join(f"    {SCRIPT} {part}" for part in parts)
    )


def _data(table: Table) -> str:
    return "" if table.configurations[0].dataset == RANDOM else " --data DATA"


def grid(titles: Cells, rows: Sequence[Cells]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
