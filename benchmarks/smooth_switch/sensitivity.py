"""Each assumption changed alone (some with what they hang on), and what that does to the signs of tables 3 to 5."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite, nan
from statistics import fmean, median

from assumptions import Assumptions
from cells import METRICS, Cell
from protocol import TABLES
from sheets import Row
from study import COMPARED, Study, Tally, tally
from tables import Entry

NUMBERS = (3, 4, 5)
"""Of the tables: random data, a run of which takes seconds."""

FITTED = "apply_s=0.0025 gradient_s=0.0014"
"""A Ray server on 2 cores as a prototype of the benchmark had it; what this host's server takes replaces it."""


@dataclass(frozen=True)
class Variation:
    """What is changed against the defaults."""

    change: str
    note: str = ""

    @property
    def assumptions(self) -> Assumptions:
        """The defaults, changed."""
        return Assumptions.parse(self.change)


_SLOW = "with 10 ms for a gradient: workers that never wait would make millions in 100 s"

VARIATIONS = (
    Variation("defaults"),
    Variation("combine=mean"),
    Variation("loss=sum", "the paper's equation 1"),
    Variation("combine=mean loss=sum"),
    Variation("count=applied"),
    Variation("initial=5"),
    Variation("increment=2"),
    Variation("increment=5"),
    Variation("cap=12"),
    Variation("compute_s=0.01"),
    Variation("hold=false compute_s=0.01", _SLOW),
    Variation("negative=abs"),
    Variation("hidden=0", "a linear model"),
    Variation("hidden=256"),
    Variation("clusters=1"),
    Variation("clusters=4"),
    Variation("apply_s=0 compute_s=0.01", "a server that takes no time, " + _SLOW),
    Variation("apply_s=0.002"),
    Variation("apply_s=0.02"),
    Variation(FITTED, "a Ray server on 2 cores, as a prototype had it"),
    Variation("compute_s=0.005"),
    Variation("compute_s=0.02"),
)


def variations(measured: Mapping[str, Mapping[str, float]]) -> tuple[Variation, ...]:
    """The list, with the times of this host's Ray server where they have been measured.

    >>> [v.change for v in variations({"ray": {"apply_s": 0.003, "gradient_s": 0.001}}) if "gradient_s" in v.change]
    ['apply_s=0.003 gradient_s=0.001']
    """
    ray = measured.get("ray")
    if ray is None:
        return VARIATIONS
    change = f"apply_s={ray['apply_s']:g} gradient_s={ray['gradient_s']:g}"
    fitted = Variation(change, "this host's Ray server, fitted")
    return tuple(fitted if variation.change == FITTED else variation for variation in VARIATIONS)


@dataclass(frozen=True)
class Effect:
    """What a variation gave."""

    variation: Variation
    signs: dict[int, Tally]
    """By table."""
    together: Tally
    centres: dict[tuple[str, str], float]
    """(``mean`` or ``median``, metric) -> that of the differences that are finite."""
    diverged: int
    """Runs of both algorithms."""

    def row(self) -> Row:
        """For a CSV file."""
        signs = {f"table_{number}_agree": signs.agree for number, signs in self.signs.items()}
        total = {
            "agree": self.together.agree,
            "entries": self.together.entries,
            "clearly_against": self.together.against,
        }
        centres = {f"{metric}_{kind}_difference": f"{value:.6g}" for (kind, metric), value in self.centres.items()}
        head = {"change": self.variation.change, "note": self.variation.note}
        return head | signs | total | centres | {"diverged_runs": self.diverged}


def needed(study: Study, chosen: tuple[Variation, ...]) -> Iterator[Cell]:
    """The runs of all variations, round after round; the synchronous ones are not compared."""
    lists = [
        replace(study, assumptions=variation.assumptions).needed(TABLES[number].configurations, COMPARED)
        for variation in chosen
        for number in NUMBERS
    ]
    for number in range(study.rounds):
        for cells in lists:
            yield from (cell for cell in cells if cell.round == number)


def effects(study: Study, chosen: tuple[Variation, ...]) -> list[Effect]:
    """Of the variations all of whose runs have been made."""
    varied = [(variation, replace(study, assumptions=variation.assumptions)) for variation in chosen]
    return [_effect(v, s) for v, s in varied if all(s.complete(TABLES[number], COMPARED) for number in NUMBERS)]


def _effect(variation: Variation, study: Study) -> Effect:
    found = {number: study.entries(TABLES[number]) for number in NUMBERS}
    everything = [entry for entries in found.values() for entry in entries]
    centres = _centres(everything)
    diverged = sum(study.diverged(TABLES[number], COMPARED) for number in NUMBERS)
    signs = {number: tally(entries) for number, entries in found.items()}
    return Effect(variation, signs, tally(everything), centres, diverged)


def _centres(entries: Iterable[Entry]) -> dict[tuple[str, str], float]:
    finite = [entry for entry in entries if isfinite(entry.ours)]
    found: dict[tuple[str, str], float] = {}
    for metric in METRICS:
        values = [entry.ours for entry in finite if entry.metric == metric]
        for name, centre in (("mean", fmean), ("median", median)):
            found[name, metric] = centre(values) if values else nan
    return found
