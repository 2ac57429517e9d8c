"""Columns of a table of strategies, as text: one set of titles for the terminal and for the report page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.metrics.repeats import Estimate

# A cell without a figure.
NONE = "–"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table, for one strategy."""

    label: str
    mean: Mapping[str, Any]
    """Mean over rounds of the strategy's summary."""
    difference: Mapping[str, Estimate | None] | None
    """Differences from the baseline; None: the strategy is the baseline."""
    rounds: int


@dataclass(frozen=True, slots=True)
class Column:
    """One column; ``group`` is written once over neighbours that share it."""

    group: str
    title: str
    cell: Callable[[Entry], str]


def figure(key: str, form: str, scale: float = 1.0) -> Callable[[Entry], str]:
    """Return cells that show one figure of the mean summary."""

    def cell(entry: Entry) -> str:
        value = entry.mean.get(key)
        return NONE if value is None else format(scale * value, form)

    return cell


def versus(measure: str, form: str, scale: float = 1.0) -> Callable[[Entry], str]:
    """Return cells that show a difference, and half of its 95 % interval if there is more than one round."""

    def cell(entry: Entry) -> str:
        if entry.difference is None:
            return "baseline" if entry.mean.get(measure) is not None else NONE
        estimate = entry.difference.get(measure)
        if estimate is None:
            return NONE
        text = format(scale * estimate.mean, "+" + form)
        return text if estimate.high is None else f"{text} ± {format(scale * (estimate.high - estimate.mean), form)}"

    return cell


_ACCURACY = (
    Column("test accuracy, %", "end", figure("test_accuracy", ".2f", 100)),
    Column("test accuracy, %", "mean", figure("test_accuracy_mean", ".2f", 100)),
    Column("test accuracy, %", "difference", versus("test_accuracy_mean", ".2f", 100)),
)
# Rates of a strategy.
PACE = (
    Column("", "updates", figure("updates", ",.0f")),
    Column("", "gradients/s", figure("gradients_per_s", ",.0f")),
    Column("", "staleness", figure("staleness_mean", ".2f")),
)
# Scores and rates of a strategy, in the width of a terminal.
BRIEF = (
    *_ACCURACY,
    Column("mean over time", "test loss", figure("test_loss_mean", ".4f")),
    Column("mean over time", "train loss", figure("train_loss_mean", ".4f")),
    *PACE,
)
# All scores of a strategy.
REACHED = (
    *_ACCURACY,
    *(
        Column(name, title, cell)
        for name in ("test loss", "train loss")
        for title, cell in (
            ("end", figure(name.replace(" ", "_"), ".4f")),
            ("mean", figure(name.replace(" ", "_") + "_mean", ".4f")),
            ("difference", versus(name.replace(" ", "_") + "_mean", ".4f")),
        )
    ),
)


def grid(columns: Sequence[Column], entries: Sequence[Entry]) -> tuple[Sequence[Column], list[list[str]]]:
    """Return the columns that have a figure for any strategy, and the cells of each line."""
    cells = [[column.cell(entry) for column in columns] for entry in entries]
    kept = [i for i in range(len(columns)) if any(line[i] != NONE for line in cells)]
    return [columns[i] for i in kept], [[line[i] for i in kept] for line in cells]


def labels(strategies: Sequence[str]) -> dict[str, str]:
    """Return short names for strategies: the fields in which they differ; policies alone by their text.

    >>> list(labels(["replicas=8", "replicas=8 aggregation=buffered:k=4"]).values())
    ['synchronous', 'buffered:k=4']
    >>> list(labels(["replicas=8 aggregation=hogwild", "replicas=4 aggregation=hogwild"]).values())
    ['replicas=8', 'replicas=4']
    """
    # The policy is a field even if the text leaves it out.
    words = {
        text: {"aggregation": "synchronous"} | dict(word.split("=", 1) for word in text.split() if "=" in word)
        for text in strategies
    }
    keys = dict.fromkeys(key for fields in words.values() for key in fields if key != "aggregation")
    # The policy comes last: it is the longest.
    apart = [key for key in (*keys, "aggregation") if len({fields.get(key) for fields in words.values()}) > 1]
    if apart in ([], ["aggregation"]):
        return {text: fields["aggregation"] for text, fields in words.items()}
    return {t: " ".join(f"{key}={fields[key]}" for key in apart if key in fields) or t for t, fields in words.items()}
