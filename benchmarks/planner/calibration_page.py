"""The page of published runs: errors by source, which configuration is chosen, and memory."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from math import ceil, exp, log
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import numpy as np
from calibration_devices import FAMILIES, NAMED, families, named
from kit.sheet import Row as Cells
from kit.words import grid

from paceline.planner.calibration.calibrate import Calibration
from paceline.planner.calibration.corrections import Corrections
from paceline.planner.calibration.device_rates import Errors
from paceline.planner.calibration.mixtures import mixture
from paceline.planner.calibration.rows import PublishedRow
from paceline.planner.devices import Taught

HEAD = """\
# Published runs, predicted from others

    python benchmarks/planner/calibration.py
    python -m paceline.plan.predict FILE.csv --calibrate FILE.csv

Nothing is measured here: {many} published runs of {sources} sources (`../shared/data/planner/calibration.csv`) are
predicted, each from all but those of its source about its model (*model*), or from other sources alone (*source*). The
second command does the same for rows of your own. An error is |predicted - measured| / measured. *Within* counts runs
in the interval that is to hold nine of ten.
"""
AIMS = """
{aim}
{suspect}

{alone}
"""
CORRECTIONS = """\
## What was learnt

Ten corrections of all rows, as factors of what is expected of them (`planner/calibration/corrections.py`); what
sources, frameworks and devices are off beside that is in effects, which are shrunk towards none.
"""
DECISIONS = """\
## Which configuration is chosen

Runs of one source with the same model, as many words and as many devices, at least three: each way to divide them is
predicted without any run of that model, and the one with most samples in a second is taken. *Regret* is how much slower
it was than the best measured one; *chance* what the middle one was; *rank* is Spearman's correlation of predicted and
measured.
"""
MEMORY = """\
## Memory

Of the worker that holds most, where a source says. Those of `korthikanti-mem` are their authors' count, not measured.
"""
Key = TypeVar("Key", bound=Hashable)
SPLITS = """\
## Drawn at random

Each drawn {draws} times and left out together, with a quarter of the runs and a fifth of the models of sources; sources
one at a time. *By source* each source counts alike, however many runs it has.
"""
AIM_TIME, AIM_MEMORY = 0.09, 0.10
AIMED = ("vtrain1", "vtrainN")
SHRUNK = (0.95, 0.9, 0.85, 0.8)


class Pair(NamedTuple):
    """A run, and what was predicted of it."""

    row: PublishedRow
    cells: Cells
    alone_s: float | None
    """What data sheets say of it; None where it has no shape."""

    @property
    def error(self) -> float:
        """Of its time."""
        return abs(float(self.cells["step_s"]) / float(self.cells["measured_s"]) - 1)

    @property
    def alone(self) -> float | None:
        """Error of what data sheets say, as a factor either way."""
        return None if self.alone_s is None else abs(log(self.alone_s / float(self.cells["measured_s"])))

    @property
    def within(self) -> bool:
        """Whether its interval held."""
        return float(self.cells["low_s"]) <= float(self.cells["measured_s"]) <= float(self.cells["high_s"])

    @property
    def memory_error(self) -> float:
        """Of what it holds."""
        return abs(float(self.cells["held_gib"]) / float(self.cells["measured_gib"]) - 1)

    @property
    def memory_within(self) -> bool:
        """Whether the interval of what it holds did."""
        return float(self.cells["low_gib"]) <= float(self.cells["measured_gib"]) <= float(self.cells["high_gib"])

    def rate(self, column: str) -> float:
        """Samples in a second."""
        return (self.row.number("gbs") or 1.0) / float(self.cells[column])


def page(
    cells: Sequence[Cells],
    rows: Sequence[PublishedRow],
    whole: Calibration,
    alone: Mapping[str, float],
    taught: Mapping[str, tuple[Taught, Errors]],
) -> str:
    """The whole text."""
    by_name = {row.name: row for row in rows}
    known = [Pair(by_name[c["row_id"]], c, alone.get(c["row_id"])) for c in cells if c["row_id"] in by_name]
    of = _by(known, lambda each: each.cells["left_out"].rstrip("0123456789 "))
    timed = {way: [each for each in pairs if each.cells["measured_s"]] for way, pairs in of.items()}
    sources = len({row.source for row in rows})
    return "\n".join(
        [
            HEAD.format(many=len(timed["model"]), sources=sources),
            times(timed),
            AIMS.format(aim=aim(timed["model"]), alone=sheets(timed["model"]), suspect=doubtful(timed["model"])),
            FAMILIES,
            families(timed),
            "",
            NAMED,
            named(taught),
            "",
            SPLITS.format(draws=len({each.cells["left_out"] for each in of["models drawn"]})),
            splits(of),
            "",
            CORRECTIONS,
            corrections(whole.corrections),
            "",
            DECISIONS,
            decisions(timed["model"]),
            "",
            MEMORY,
            memory(of["model"]),
            "",
            room(of["model"]),
            "",
        ]
    )


def times(timed: Mapping[str, Sequence[Pair]]) -> str:
    """A line for each source, and one for all."""
    head = ("source", "runs", "model: mean", "median", "within", "source: mean", "median", "within")
    by_source = {way: _by(timed[way], lambda each: each.row.source) for way in ("model", "source")}
    lines = [_line(name, pairs, by_source["source"][name]) for name, pairs in by_source["model"].items()]
    return grid(head, [*lines, _line("all", timed["model"], timed["source"])])


def _line(name: str, model: Sequence[Pair], source: Sequence[Pair]) -> tuple[object, ...]:
    both = [part for pairs in (model, source) for part in _figures(pairs)]
    return (name, len(model), *both)


def _figures(pairs: Sequence[Pair]) -> tuple[str, str, str]:
    errors = [each.error for each in pairs]
    return _percent(fmean(errors)), _percent(median(errors)), _percent(fmean(each.within for each in pairs))


def splits(of: Mapping[str, Sequence[Pair]]) -> str:
    """A line for each way to leave runs out."""
    head = ("left out", "predicted", "mean", "median", "within", "by source: mean", "within", "memory: mean", "within")
    return grid(head, [_split(way, pairs) for way, pairs in of.items()])


def _split(way: str, pairs: Sequence[Pair]) -> tuple[object, ...]:
    timed = [each for each in pairs if each.cells["measured_s"]]
    held = [each for each in pairs if each.cells["measured_gib"]]
    by_source = list(_by(timed, lambda each: each.row.source).values())
    alike = (
        fmean(fmean(each.error for each in own) for own in by_source),
        fmean(fmean(each.within for each in own) for own in by_source),
        fmean(each.memory_error for each in held),
        fmean(each.memory_within for each in held),
    )
    return (way, len(timed), *_figures(timed), *map(_percent, alike))


def aim(pairs: Sequence[Pair]) -> str:
    """The aim and whether it is met."""
    own = [each.error for each in pairs if each.row.source in AIMED]
    found = fmean(own)
    verdict = "met" if found <= AIM_TIME else "not met"
    return (
        f"Aim: {AIM_TIME:.0%} on the {len(own)} rows of Megatron-DeepSpeed on A100 ({' and '.join(AIMED)}) with each "
        f"model left out: {_percent(found)}, {verdict}.\n"
    )


def sheets(pairs: Sequence[Pair]) -> str:
    """How far off what nothing was learnt for is."""
    known = [each for each in pairs if each.alone is not None and mixture(each.row) is None]
    told = [each for each in known if not each.row.doubtful and each.row.family != "A64FX"]
    ranked = sorted(each.alone or 0.0 for each in told)
    held = exp(ranked[ceil(0.9 * len(ranked)) - 1])
    return (
        f"What `paceline plan` says of a shape on a cluster of data sheets, without any row, is off these {len(told)}\n"
        f"runs on GPUs by a factor of {exp(median(ranked)):.2f} in the middle and of {held:.2f} for nine of ten."
    )


def doubtful(pairs: Sequence[Pair]) -> str:
    """How many runs leave open what they hang on."""
    many = sum(each.row.doubtful for each in pairs)
    return f"{many} runs contradict themselves or leave their micro-batch or division open; they are in the table."


def corrections(found: Corrections) -> str:
    """Each."""
    return grid(("correction", "factor"), [(each.name, f"{getattr(found, each.name):.2f}") for each in fields(found)])


def decisions(pairs: Sequence[Pair]) -> str:
    """By source, over its groups of runs that can stand for each other."""
    groups = _by(
        pairs, lambda each: (each.row.source, each.row.model, each.row.text("n_devices"), each.row.text("seq"))
    )
    by_source = defaultdict[str, list[Sequence[Pair]]](list)
    for (source, *_), own in groups.items():
        if len(own) >= 3:
            by_source[source].append(own)
    head = ("source", "groups", "runs", "best chosen", "mean regret", "worst regret", "chance", "rank")
    return grid(head, [_decided(source, own) for source, own in by_source.items()])


def _decided(source: str, groups: Sequence[Sequence[Pair]]) -> tuple[object, ...]:
    regrets, chances = [regret(each) for each in groups], [chance(each) for each in groups]
    ranks = fmean(rank(each) for each in groups)
    right = sum(each == 0 for each in regrets)
    figures = (_percent(fmean(regrets)), _percent(max(regrets)), _percent(fmean(chances)), f"{ranks:.2f}")
    return (source, len(groups), sum(map(len, groups)), f"{right} of {len(groups)}", *figures)


def regret(own: Sequence[Pair]) -> float:
    """How much slower the chosen one was than the best."""
    chosen = max(own, key=lambda each: each.rate("step_s"))
    return max(each.rate("measured_s") for each in own) / chosen.rate("measured_s") - 1


def chance(own: Sequence[Pair]) -> float:
    """The same of the middle one."""
    rates = [each.rate("measured_s") for each in own]
    return max(rates) / median(rates) - 1


def rank(own: Sequence[Pair]) -> float:
    """Spearman's: the correlation of places; runs that are alike share the mean of theirs."""
    predicted, measured = (_places([each.rate(column) for each in own]) for column in ("step_s", "measured_s"))
    return float(np.corrcoef(predicted, measured)[0, 1]) if np.ptp(predicted) and np.ptp(measured) else 0.0


def _places(values: Sequence[float]) -> list[float]:
    ranked = sorted(values)
    return [ranked.index(value) + (ranked.count(value) - 1) / 2 for value in values]


def memory(pairs: Sequence[Pair]) -> str:
    """By source."""
    told = _by([each for each in pairs if each.cells["measured_gib"]], lambda each: each.row.source)
    lines = [
        (name, len(own), _percent(fmean(each.memory_error for each in own)), _worst(own)) for name, own in told.items()
    ]
    return grid(("source", "runs", "mean error", "worst"), lines)


def _worst(own: Sequence[Pair]) -> str:
    found = max(own, key=lambda each: each.memory_error)
    return f"{_percent(found.memory_error)} ({found.row.name})"


def room(pairs: Sequence[Pair]) -> str:
    """Devices with less memory than was needed, and runs that fitted theirs."""
    told = [each for each in pairs if each.cells["measured_gib"] and not each.row.doubtful]
    lines = [(f"{part:.0%} of what was measured", f"{_too_small(told, part)} of {len(told)}") for part in SHRUNK]
    ran = [each for each in pairs if each.cells["measured_s"] and each.row.number("gpu_mem_gb")]
    lost = sum(each.cells["fits"] == "no" for each in ran)
    text = f"Of {len(ran)} runs on devices whose memory is known, all of which fitted, {lost} are predicted not to fit."
    return "\n".join([grid(("a device with", "predicted not to fit"), lines), "", text])


def _too_small(told: Sequence[Pair], part: float) -> int:
    return sum(float(each.cells["held_gib"]) > part * float(each.cells["measured_gib"]) for each in told)


def _by(pairs: Sequence[Pair], key: Callable[[Pair], Key]) -> dict[Key, list[Pair]]:
    found: dict[Key, list[Pair]] = {}
    for each in pairs:
        found.setdefault(key(each), []).append(each)
    return found


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
