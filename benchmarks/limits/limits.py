"""What is to be reached where speed on one host has come up against something: the rows of the page.

A row is measured by another benchmark's own command, which prints a table or leaves a CSV file, and is read from there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from paceline.schedule.base import SHORT_PASS_S

PAIRS = 9
"""Turns of each side."""

Told: TypeAlias = Sequence[Mapping[str, str]]
"""Rows of a table that a command has made."""


class Figure(NamedTuple):
    """One number.

    Args:
        label: what of the row it is; empty where the row has one.
        value: a ratio, or seconds.
        aim: what it is to be.
        least: whether that is the least, rather than the most.
        bound: the best that this machine allows, as far as that was measured: the same without what is communicated.
        instead: what else is so where the aim says that one or the other has to be; empty: nothing.
    """

    label: str
    value: float
    aim: float
    least: bool = False
    bound: float | None = None
    instead: str = ""

    @property
    def reached(self) -> bool:
        """Whether the number is as it is to be, to two places: turns differ by as much."""
        value = round(self.value, 2)
        return value >= self.aim if self.least else value <= self.aim

    @property
    def met(self) -> bool:
        """Whether the aim is met."""
        return self.reached or bool(self.instead)

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.aim:g}"


class Limit(NamedTuple):
    """One row.

    Args:
        what: the ratio, in words.
        command: a script beside this folder, and its words.
        figures: of what it has made.
        sheet: file that it leaves in the folder ``--out``; empty: it prints Markdown.
    """

    what: str
    command: Sequence[str]
    figures: Callable[[Told], Iterator[Figure]]
    sheet: str = ""


def _ours(told: Told, **wanted: str) -> Iterator[Mapping[str, str]]:
    """Our rows of a sheet that have these values."""
    wanted = {"side": "paceline"} | wanted
    return (row for row in told if all(row[name] == value for name, value in wanted.items()))


STEP_OF_ONE = {"mlp 256": 0.60, "mlp 1024": 0.57, "transformer": 0.62, "resnet": 0.75, "inception": 0.75}


def shard_steps(told: Told) -> Iterator[Figure]:
    bounds = {row["row"]: float(row["of_one"]) for row in told if row["side"] == "nothing sent"}
    for row in _ours(told, backend="shm"):
        if row["row"] in STEP_OF_ONE:
            yield Figure(row["row"], float(row["of_one"]), STEP_OF_ONE[row["row"]], bound=bounds.get(row["row"]))


def shard_samples(told: Told) -> Iterator[Figure]:
    worst = max(_ours(told, backend="shm"), key=lambda row: float(row["forward_of_one"]))
    yield Figure(f"the worst, {worst['row']}", float(worst["forward_of_one"]), 1.0)


MICRO_BATCHES = 8
"""Of the pipelines' benchmark."""

FORWARD, BACKWARD = 1, 2
"""Parts of a pass's time, about."""

OF_IDEAL = {"small": 1.08, "large": 1.03}


def stage_steps(told: Told) -> Iterator[Figure]:
    for row in _ours(told, backend="shm"):
        yield Figure(f"{row['size']}, {row['schedule']}", float(row["of_ideal"]), OF_IDEAL[row["size"]])


def zero_bubble(told: Told) -> Iterator[Figure]:
    """Either it is quicker, or plans don't propose it: not where a stage's forward passes are short."""
    for row in _ours(told, backend="shm", schedule="zero-bubble"):
        forward_s = float(row["one_ms"]) / 1e3 / (MICRO_BATCHES * int(row["stages"]) * (FORWARD + BACKWARD) / FORWARD)
        instead = "not proposed" if forward_s <= SHORT_PASS_S else ""
        yield Figure(row["size"], float(row["of_beside"]), 0.95, instead=instead)


def on_gloo(told: Told) -> Iterator[Figure]:
    for row in _ours(told, backend="gloo"):
        if row["of_torch"]:
            yield Figure(f"{row['size']}, {row['schedule']}", float(row["of_torch"]), 1.0)


OF_DDP = {"32": 0.65, "128": 0.75}


def synchronous(told: Told) -> Iterator[Figure]:
    bounds = {(row["batch"], row["ranks"]): float(row["ratio"]) for row in told if row["side"] == "alone"}
    for row in _ours(told):
        batch, ranks = row["batch"], row["ranks"]
        bound = bounds.get((batch, ranks))
        yield Figure(f"batch {batch}, {ranks} ranks", float(row["ratio"]), OF_DDP[batch], bound=bound)


TIMES_GLOO = {"all_reduce": 2.0, "send and back": 3.0}


def collectives(told: Told) -> Iterator[Figure]:
    for row in told:
        if (row["call"] == "all_reduce") == (int(row["bytes"]) > 2**20):
            label = f"{row['call']}, {int(row['bytes']):,} bytes"
            yield Figure(label, float(row["ratio"]), TIMES_GLOO[row["call"]], least=True)


def hogwild(told: Told) -> Iterator[Figure]:
    for row in told:
        if row["workers"] == "2":
            yield Figure("", float(row["ratio"]), 1.0, least=True)


def asynchronous(told: Told) -> Iterator[Figure]:
    for row in told:
        yield Figure("", float(row["ratio"]), 15.0, least=True)
        yield Figure("compile=graph", float(row["graph ratio"]), 15.0, least=True)


def one_replica(told: Told) -> Iterator[Figure]:
    for row in told:
        words = "" if row["side"] == "default" else f", {row['side']}"
        yield Figure(f"{row['model']}, {row['optimizer']}, {row['engine']}{words}", float(row["ratio"]), 1.0)


def plans(told: Told) -> Iterator[Figure]:
    for row in told:
        yield Figure(row["model"], float(row["CPU seconds"].split()[0]), 2.0 if row["model"] == "t5-2" else 5.0)


def first_step(told: Told) -> Iterator[Figure]:
    for row in told:
        if row["strategy"] == "stages=2":
            yield Figure("", float(row["of the floor"].split()[0]), 1.5)


_SHARDS = ("tensor/measure.py", "--backends", "shm", "--pairs", f"{PAIRS}")
_STAGES = ("pipeline/measure.py", "--stages", "2", "--pairs", f"{PAIRS}")
_ZERO_BUBBLE = (*_STAGES, "--backends", "shm", "--schedules", "zero-bubble")
_RANKS = ("data_parallel/measure.py", "--models", "mlp", "--ranks", "2", "4", "8", "--batches", "32", "128")
_CALLS = ("collectives/measure.py", "--ranks", "8", "--calls", *TIMES_GLOO, "--sizes", "1K", "16M", "100M")

LIMITS = {
    "shards": Limit("two shards ÷ one process, a step", _SHARDS, shard_steps, "steps.csv"),
    "samples": Limit("two shards ÷ one process, forward of one sample", _SHARDS, shard_samples, "steps.csv"),
    "stages": Limit("two stages ÷ the ideal, a step", _STAGES, stage_steps, "steps.csv"),
    "zero-bubble": Limit("zero-bubble ÷ 1F1B, a step in two stages", _ZERO_BUBBLE, zero_bubble, "steps.csv"),
    "gloo": Limit("pipelines on Gloo ÷ torch's on Gloo", _STAGES, on_gloo, "steps.csv"),
    "synchronous": Limit(
        "synchronous step of 5.8M parameters ÷ DDP's on Gloo",
        (*_RANKS, "--sides", "alone", "ddp gloo", "paceline", "--pairs", f"{PAIRS}"),
        synchronous,
        "data_parallel.csv",
    ),
    "collectives": Limit(
        "Gloo's time ÷ backend shm's, 8 ranks", (*_CALLS, "--pairs", f"{PAIRS}"), collectives, "collectives.csv"
    ),
    "hogwild": Limit(
        "Hogwild, 2 workers: updates/s ÷ PyTorch's recipe",
        ("parameter_server/measure.py", "hogwild", "--pairs", f"{PAIRS}", "--seconds", "5"),
        hogwild,
    ),
    "asynchronous": Limit(
        "asynchronous updates/s of 22k parameters, 8 workers, forward and backward ÷ Ray actors that compute nothing",
        ("parameter_server/measure.py", "computing", "--pairs", f"{PAIRS}"),
        asynchronous,
    ),
    "one-replica": Limit(
        "one replica's step ÷ the plain loop's, one thread",
        ("limits/one_replica.py", "--pairs", f"{PAIRS}"),
        one_replica,
    ),
    "plans": Limit("search for a sharding plan, CPU seconds", ("tensor/search.py", "--repeats", f"{PAIRS}"), plans),
    "first-step": Limit(
        "12-layer GPT-2 in two stages, until the first step ÷ imports, model and one export",
        ("start/models.py", "--models", "gpt2", "--repeats", f"{PAIRS}"),
        first_step,
    ),
}
"""By name; rows of one command are measured by it once."""
