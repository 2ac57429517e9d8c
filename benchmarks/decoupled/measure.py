"""Goodput of policies under stragglers and deaths, in virtual time: samples in A, and what A is worth, after a time.

    python benchmarks/decoupled/measure.py           # all rows, a few minutes
    python benchmarks/decoupled/measure.py --page

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import takewhile
from math import inf
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.machine import described, machine
from kit.sheet import Row, Sheet
from kit.words import grid
from matplotlib.axes import Axes

from paceline import Program, train
from paceline.clock.cluster_file import Links
from paceline.clock.distributions import Constant
from paceline.clock.network import Absence, Failures, Network
from paceline.clock.times import Times
from paceline.datasets.synthetic import synthetic
from paceline.plots.curves import PALETTE
from paceline.report.figures import PALE, drawn

HERE = Path(__file__).parent
REPLICAS, SECONDS, SEEDS = 8, 600.0, range(10)
COMPUTE_S, TRANSFER_S = 1.0, 0.5
LINKS = Links(inside_bytes_per_s=inf, between_bytes_per_s=inf, latency_s=TRANSFER_S, between_latency_s=TRANSFER_S)
"""Of hosts that come and go: no message waits for another, as where times= says transfer=0.5."""

POLICIES = {
    "synchronous": "synchronous",
    "smooth-switch": "smooth-switch:adaptive",
    "DiLoCo": "local-steps:period=20,outer=nesterov",
    "decoupled": "decoupled:period=20",
    "decoupled, hold": "decoupled:period=20,hold=true",
}
RIGID = {"synchronous, rigid": "synchronous", "DiLoCo, rigid": "DiLoCo"}
"""Jobs in which all replicas stop while one is dead; without deaths they are the policies named here."""
STRAGGLERS = {
    "none": None,
    "two slow": "fraction=0.25 exponential:mean=3",
    "hiccups": "fraction=1 pareto:scale=0.1,shape=1.2",
}
DEATHS = {"none": inf, "600 s": 600.0, "300 s": 300.0, "150 s": 150.0}
"""Mean seconds from a host's return to its next failure."""
REPAIR_S = 60.0
WITH_DEATHS = ("none", "two slow")
"""Stragglers that are measured with deaths, too."""


def program(seed: int) -> Program:
    """Return a problem that a run of this length does not finish: 10 classes of 8 clusters each, 40,000 samples."""
    return synthetic(data=None, seed=0, samples=50_000, clusters=8).seeded(seed)


def cluster(seed: int, between_s: float, *, rigid: bool = False, seconds: float = SECONDS) -> Network:
    """Return a host for each replica; all but the first, which has the server of A, die and come back.

    Args:
        seed: of the failures.
        between_s: mean time from a return to the next failure; infinity: there is none.
        rigid: whether all hosts go as soon as one does, until all are back.
        seconds: what is drawn lasts so long.
    """
    away = list[Absence]()
    if between_s < inf:
        drawn_from = Network(REPLICAS, LINKS, failures=Failures(between_s, REPAIR_S))
        for host in range(1, REPLICAS):
            for from_s, until_s in takewhile(lambda each: each[0] < seconds, drawn_from.absences_of(host, seed)):
                away += [Absence(each, from_s, until_s) for each in (range(REPLICAS) if rigid else (host,))]
    return Network(REPLICAS, LINKS, tuple(away))


def present(network: Network, seconds: float = SECONDS) -> float:
    """Return the share of their time during which the hosts of a network are there."""
    absences = (each for host in range(network.hosts) for each in network.absences_of(host, seed=0))
    return 1 - sum(min(until_s, seconds) - from_s for from_s, until_s in absences) / (network.hosts * seconds)


def measure(sheet: Sheet, seconds: float = SECONDS) -> None:
    """Train under each policy with each kind of stragglers and deaths; all policies meet the same ones."""
    for seed in SEEDS:
        for stragglers, delay in STRAGGLERS.items():
            for deaths, between_s in DEATHS.items():
                if deaths != "none" and stragglers not in WITH_DEATHS:
                    continue
                for name in [*POLICIES, *(RIGID if deaths != "none" else ())]:
                    if sheet.find(name, stragglers, deaths, seed) is None:
                        network = cluster(seed, between_s, rigid=name in RIGID, seconds=seconds)
                        keys = {"side": name, "stragglers": stragglers, "deaths": deaths, "seed": seed}
                        found = figures_of(POLICIES[RIGID.get(name, name)], seed, network, delay, seconds)
                        sheet.put(keys | found | machine())
                        print(sheet.find(name, stragglers, deaths, seed), flush=True)


def figures_of(
    policy: str, seed: int, network: Network, delay: str | None, seconds: float = SECONDS
) -> dict[str, float]:
    """Return the figures of one run."""
    run = train(
        program(seed),
        f"replicas={REPLICAS} servers=1 aggregation={policy}",
        engine="virtual",
        seconds=seconds,
        evaluate_every=seconds / 4,
        times=Times(Constant(COMPUTE_S), network=network),
        delay=delay,
        progress=False,
    )
    last = run.history[-1]
    assert last.test_loss is not None
    rates = {"samples_per_s": run.summary["samples_per_s"], "updates": run.summary["updates"]}
    return rates | {"test_loss": last.test_loss}


# ---------------------------------------------------------------------------------------------------------- the page


def figures(rows: Sequence[Row], name: str, stragglers: str, deaths: str = "none") -> tuple[float, float, float] | None:
    """Return medians over the seeds: samples per second, goodput, test loss; None: there are no such rows."""
    of = {(row["side"], row["stragglers"], row["deaths"], row["seed"]): row for row in rows}
    base = RIGID.get(name, name)
    pairs = [
        (row, of[base, "none", "none", seed])
        for (side, *kind, seed), row in of.items()
        if side == name and kind == [stragglers, deaths] and (base, "none", "none", seed) in of
    ]
    if not pairs:
        return None
    rates, calm = ([float(pair[k]["samples_per_s"]) for pair in pairs] for k in (0, 1))
    losses = [float(row["test_loss"]) for row, _ in pairs]
    return median(rates), median(r / c for r, c in zip(rates, calm, strict=True)), median(losses)


def share(between_s: float) -> float:
    """Return the share of their time during which hosts are there, mean of the seeds."""
    return fmean(present(cluster(seed, between_s)) for seed in SEEDS)


def page(sheet: Sheet, folder: Path) -> None:
    """Write README.md and the pictures from the rows."""
    rows = sheet.rows
    deaths = death_tables(rows)
    parts = [HEAD, *straggler_tables(rows), *([DEATHS_HEAD, *deaths] if deaths else ()), f"Machine: {described(rows)}."]
    (folder / "results").mkdir(exist_ok=True)
    (folder / "results" / "goodput.svg").write_text(bars(rows) + "\n", encoding="utf-8")
    if deaths:
        (folder / "results" / "deaths.svg").write_text(curves(rows) + "\n", encoding="utf-8")
    text = "\n\n".join(parts)
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")


def straggler_tables(rows: Sequence[Row]) -> list[str]:
    """Return a table for each kind of stragglers, without deaths."""
    tables = []
    for stragglers, delay in STRAGGLERS.items():
        lines = []
        for name, policy in POLICIES.items():
            found = figures(rows, name, stragglers)
            if found is not None:
                rate, goodput, loss = found
                lines.append((name, f"`{policy}`", f"{rate:.1f}", f"{goodput:.3f}", f"{loss:.4f}"))
        if lines:
            head = ("", "policy", "samples per second", "goodput", "test loss")
            said = f"`--delay {delay!r}`" if delay else "without stragglers"
            tables.append(f"## {stragglers.capitalize()}: {said}\n\n{grid(head, lines)}")
    return tables


def death_tables(rows: Sequence[Row]) -> list[str]:
    """Return a table for each kind of stragglers that is measured with deaths; each rate is a column of each figure."""
    rates = [deaths for deaths in DEATHS if deaths != "none"]
    head = ["", *(f"{what}, {deaths}" for what in ("goodput", "samples per second", "test loss") for deaths in rates)]
    there = ["*hosts that are there*", *(f"{share(DEATHS[deaths]):.3f}" for deaths in rates), *([""] * 2 * len(rates))]
    columns = ((1, ".3f"), (0, ".1f"), (2, ".4f"))
    tables = []
    for stragglers in WITH_DEATHS:
        lines = [there]
        for name in (*POLICIES, *RIGID):
            found = [figures(rows, name, stragglers, deaths) for deaths in rates]
            if any(found):
                cells = (f"{each[k]:{form}}" if each else "" for k, form in columns for each in found)
                lines.append([name, *cells])
        if lines[1:]:
            also = "" if stragglers == "none" else f", and {stragglers}: `--delay {STRAGGLERS[stragglers]!r}`"
            tables.append(f"### Deaths{also}\n\n{grid(head, lines)}")
    return tables


def bars(rows: Sequence[Row]) -> str:
    """Return bars of the goodput of each policy, a colour for each kind of stragglers, as SVG."""
    kinds = [kind for kind in STRAGGLERS if kind != "none"]
    height = 0.8 / len(kinds)

    def draw(axes: list[Axes]) -> None:
        for k, kind in enumerate(kinds):
            found = [figures(rows, name, kind) for name in POLICIES]
            places = [i + k * height for i in range(len(POLICIES))]
            axes[0].barh(places, [f[1] if f else 0.0 for f in found], height, color=PALETTE[k], label=kind)
        axes[0].set_yticks([i + (len(kinds) - 1) * height / 2 for i in range(len(POLICIES))], list(POLICIES))
        axes[0].invert_yaxis()
        axes[0].set_xlim(0, 1)
        axes[0].legend(frameon=False, loc="lower right")

    title = "Goodput under stragglers: samples per second ÷ those without"
    return drawn(draw, title, says="goodput of each policy under each kind of stragglers")


def curves(rows: Sequence[Row]) -> str:
    """Return the goodput of each policy over the rate of failures, without stragglers and with them, as SVG."""
    failures = [SECONDS / between_s for between_s in DEATHS.values()]
    shares = [share(between_s) for between_s in DEATHS.values()]

    def draw(axes: list[Axes]) -> None:
        for own, stragglers in zip(axes, WITH_DEATHS, strict=True):
            own.plot(failures, shares, color=PALE, linestyle=":", label="hosts that are there")
            for k, name in enumerate(POLICIES):
                draw_side(own, stragglers, name, PALETTE[k])
                for rigid in (each for each, base in RIGID.items() if base == name):
                    draw_side(own, stragglers, rigid, PALETTE[k])
            own.set_ylim(0, 1.02)
            own.set_xticks(failures, [f"{each:g}" for each in failures])
            own.set_ylabel("no stragglers" if stragglers == "none" else stragglers)
        axes[-1].set_xlabel(f"failures of a host in {SECONDS:g} s of being there, mean")
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside right center")

    def draw_side(axes: Axes, stragglers: str, name: str, colour: str) -> None:
        base = RIGID.get(name, name)
        found = [figures(rows, base if kind == "none" else name, stragglers, kind) for kind in DEATHS]
        points = [(x, each[1]) for x, each in zip(failures, found, strict=True) if each]
        places, goodput = [x for x, _ in points], [y for _, y in points]
        style = "--" if name in RIGID else "-"
        axes.plot(places, goodput, style, color=colour, marker="o", markersize=3, label=name)

    title = "Goodput under deaths: samples per second ÷ those without"
    return drawn(draw, title, rows=2, height_in=4.8, says="goodput of each policy over the rate of failures")


HEAD = f"""# Decoupled

What Decoupled DiLoCo claims (arXiv 2604.21428), in small: replicas that wait for no straggler and for no dead one keep
their goodput, and A is worth as much after the same time. Goodput is samples in A per second of virtual time, divided
by those of the same policy without stragglers and deaths.

    python benchmarks/decoupled/measure.py
    python benchmarks/decoupled/measure.py --page

{REPLICAS} replicas with batch 32 train the built-in `synthetic` perceptron on 40,000 samples of 10 classes with 8
clusters each, for {SECONDS:g} s of virtual time; a step takes {COMPUTE_S:g} s, and sending A or Δ {TRANSFER_S:g} s.
Medians of {len(SEEDS)} seeds; each seed has the same data, the same delays and the same deaths under all policies. Two
slow replicas of eight, whose steps take 4 s on average, leave 81 % of what all could do in periods of 20 steps, and
85 % where each step is sent: on average no goodput can be above that.

![Goodput under stragglers](results/goodput.svg)"""

DEATHS_HEAD = f"""## Deaths: hosts that go and come back

Each replica has a host of its own. Seven of the eight fail at random, on average 600, 300 or 150 s after they came
back, for the more chips a replica has, the sooner one of them fails; they are away for {REPAIR_S:g} s on average. The
first has the server of A, and stays. These are the `[[absences]]` of a
[cluster's file](../../docs/choosing-a-policy.md#on-a-cluster-that-is-not-there), here built in Python. What a replica
was at when it died is lost; one that is back begins with the A of that time.

Policies are elastic: they go on with the replicas that are left, and neither a death nor a return takes time of its
own. *Rigid* jobs are those of one process group: all replicas stop when one dies, until all are back, and what they
were at is lost. Real ones lose more: here nothing has to start, and A is that of the last update, not of a checkpoint.

Deaths alone cost an elastic policy little more than the time of the hosts that are away, unless a round waits for all:
a replica that comes back in the middle of it then lets everybody wait (DiLoCo; and decoupled that holds, up to the end
of the grace window). A death costs decoupled up to 20 steps of a replica where it costs others one; yet its loss is
that without deaths. Under deaths and two slow replicas smooth-switch has the higher goodput, for it exchanges each
step; decoupled has more samples in A, and the lower loss.

![Goodput under deaths](results/deaths.svg)"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not there yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write README.md alone")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and README.md")
    said = parser.parse_args(arguments)
    sheet = Sheet(said.out / "results" / "goodput.csv", ("side", "stragglers", "deaths", "seed"))
    if not said.page:
        measure(sheet)
    page(sheet, said.out)


if __name__ == "__main__":
    main()
