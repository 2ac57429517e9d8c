"""Goodput of policies under stragglers, in virtual time: samples that A has, and what A is worth, after the same time.

    python benchmarks/decoupled/measure.py           # all rows, a few minutes
    python benchmarks/decoupled/measure.py --page

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.machine import described, machine
from kit.sheet import Row, Sheet
from kit.words import grid
from matplotlib.axes import Axes

from paceline import Program, train
from paceline.datasets.synthetic import synthetic
from paceline.report.figures import drawn
from paceline.report.inputs import PALETTE

HERE = Path(__file__).parent
REPLICAS, SECONDS, SEEDS = 8, 600.0, (0, 1, 2)
TIMES = "compute=1 transfer=0.5"

POLICIES = {
    "synchronous": "synchronous",
    "smooth-switch": "smooth-switch:adaptive",
    "DiLoCo": "local-steps:period=20,outer=nesterov",
    "decoupled": "decoupled:period=20",
    "decoupled, hold": "decoupled:period=20,hold=true",
}
STRAGGLERS = {
    "none": None,
    "two slow": "fraction=0.25 exponential:mean=3",
    "hiccups": "fraction=1 pareto:scale=0.1,shape=1.2",
}


def program(seed: int) -> Program:
    """Return a problem that a run of this length does not finish: 10 classes of 8 clusters each, 40,000 samples."""
    return synthetic(data=None, seed=0, samples=50_000, clusters=8).seeded(seed)


def measure(sheet: Sheet, seconds: float = SECONDS) -> None:
    """Train under each policy with each kind of stragglers; all policies meet the same delays."""
    for seed in SEEDS:
        for stragglers, delay in STRAGGLERS.items():
            for name, policy in POLICIES.items():
                if sheet.find(name, stragglers, seed) is None:
                    sheet.put(row(name, policy, stragglers, delay, seed, seconds) | machine())
                    print(sheet.find(name, stragglers, seed), flush=True)


def row(name: str, policy: str, stragglers: str, delay: str | None, seed: int, seconds: float) -> dict[str, object]:
    """Return the figures of one run."""
    run = train(
        program(seed),
        f"replicas={REPLICAS} aggregation={policy}",
        engine="virtual",
        seconds=seconds,
        evaluate_every=seconds / 4,
        times=TIMES,
        delay=delay,
        progress=False,
    )
    last = run.history[-1]
    return {
        "side": name,
        "stragglers": stragglers,
        "seed": seed,
        "samples_per_s": run.summary["samples_per_s"],
        "updates": run.summary["updates"],
        "test_loss": last.test_loss,
    }


def figures(rows: Sequence[Row], name: str, stragglers: str) -> tuple[float, float, float] | None:
    """Return medians over the seeds: samples per second, goodput, test loss; None: there are no such rows."""
    of = {(row["stragglers"], row["seed"]): row for row in rows if row["side"] == name}
    seeds = [seed for kind, seed in of if kind == stragglers and ("none", seed) in of]
    if not seeds:
        return None
    rates = [float(of[stragglers, seed]["samples_per_s"]) for seed in seeds]
    calm = [float(of["none", seed]["samples_per_s"]) for seed in seeds]
    losses = [float(of[stragglers, seed]["test_loss"]) for seed in seeds]
    return median(rates), median(r / c for r, c in zip(rates, calm, strict=True)), median(losses)


def page(sheet: Sheet, folder: Path) -> None:
    """Write README.md and the picture from the rows."""
    rows, body = sheet.rows, list[str]()
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
            body.append(f"## {stragglers.capitalize()}: {said}\n\n{grid(head, lines)}")
    if any(figures(rows, name, kind) for name in POLICIES for kind in STRAGGLERS if kind != "none"):
        (folder / "results").mkdir(exist_ok=True)
        (folder / "results" / "goodput.svg").write_text(picture(rows) + "\n", encoding="utf-8")
    text = "\n\n".join([HEAD, *body, f"Machine: {described(rows)}."])
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")


def picture(rows: Sequence[Row]) -> str:
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


HEAD = f"""# Decoupled

What Decoupled DiLoCo claims (arXiv 2604.21428), in small: replicas that wait for no straggler keep their goodput, and
A is worth as much after the same time. Goodput is samples in A per second of virtual time, divided by those of the same
policy without stragglers.

    python benchmarks/decoupled/measure.py
    python benchmarks/decoupled/measure.py --page

{REPLICAS} replicas with batch 32 train the built-in `synthetic` perceptron on 40,000 samples of 10 classes with 8
clusters each, for {SECONDS:g} s of virtual time; a step takes 1 s, and sending A or Δ 0.5 s. Medians of {len(SEEDS)}
seeds; each seed has the same data and the same delays under all policies. Two slow replicas of eight, whose steps take
4 s on average, leave 81 % of what all could do in periods of 20 steps, and 85 % where each step is sent: no goodput can
be above that. Replicas that die and come back are not in it, for virtual time has no such event.

![Goodput](results/goodput.svg)"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not there yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write README.md alone")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and README.md")
    said = parser.parse_args(arguments)
    sheet = Sheet(said.out / "results" / "goodput.csv", ("side", "stragglers", "seed"))
    if not said.page:
        measure(sheet)
    page(sheet, said.out)


if __name__ == "__main__":
    main()
