"""Updates that are no weighted sum, in virtual time: under replicas that lie, and with gradients that are stale.

    python benchmarks/reducers/measure.py           # all rows, some minutes
    python benchmarks/reducers/measure.py --page

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from kit.machine import described, machine
from kit.sheet import Row, Sheet
from kit.words import grid

from paceline import Program, launch, train
from paceline.datasets import load_program
from paceline.program import Tree

HERE = Path(__file__).parent
REPLICAS, LIARS, STEPS, SEEDS = 10, 2, 300, range(5)
RULES = {
    "mean": "synchronous",
    "median": "robust",
    "trimmed mean": "robust:by=(trimmed-mean:trim=2)",
    "Krum": "robust:by=(krum:faulty=2)",
    "Multi-Krum": "robust:by=(krum:faulty=2,best=6)",
}
ATTACKS = ("none", "flipped", "noise")

STALE = (9, 25)
"""Replicas, of which each Δ is as stale on average as there are others."""
STRENGTHS = ("none", "0.04", "1", "10")
EPOCHS = 8


# --------------------------------------------------------------------------------------------------------- the attacks


def attacked(program: Program) -> Program:
    """Return a program whose loss takes, besides targets, a factor: (targets, factor)."""

    def loss(output: Tree, target: Tree) -> Any:
        if isinstance(target, tuple):
            targets, factor = target
            return program.loss(output, targets) * factor
        return program.loss(output, target)

    return replace(program, loss=loss)


def loop(worker: Any, *, attack: str, liars: int = LIARS) -> None:
    """Train; the first replicas send five times the gradient the other way, or twenty times that of noise."""
    generator = torch.Generator().manual_seed(worker.replica)
    for batch in worker.batches():
        inputs, targets = batch.input, batch.target
        if worker.replica >= liars or attack == "none":
            worker.step((inputs, targets))
        elif attack == "flipped":
            worker.step((inputs, (targets, torch.tensor(-5.0))))
        else:
            noise = 10 * torch.randn(inputs.shape, generator=generator)
            classes = torch.randint(10, targets.shape, generator=generator)
            worker.step((noise, (classes, torch.tensor(20.0))))


def accuracy_under(attack: str, policy: str, seed: int, steps: int = STEPS) -> float:
    """Return the test accuracy of `digits` after a run."""
    run = launch(
        functools.partial(loop, attack=attack),
        attacked(load_program("digits", data=None, seed=seed, batch_size=32)),
        f"replicas={REPLICAS} aggregation={policy}",
        engine="virtual",
        steps=steps,
        evaluate_every=10**9,
        progress=False,
    )
    return float(run.summary["test_accuracy"])


def stale_figures(replicas: int, strength: str, seed: int) -> dict[str, float]:
    """Return accuracy and loss of `digits` by asynchronous replicas whose steps take exponential times."""
    policy = "asynchronous" if strength == "none" else f"delay-compensated:strength={strength}"
    run = train(
        load_program("digits", data=None, seed=seed, batch_size=32),
        f"replicas={replicas} aggregation={policy}",
        engine="virtual",
        epochs=EPOCHS,
        times="compute=exponential:mean=1",
        evaluate_every=10**9,
        progress=False,
    )
    loss = run.history[-1].test_loss
    assert loss is not None
    counts = {int(staleness): count for staleness, count in run.summary["staleness"].items()}
    mean = sum(staleness * count for staleness, count in counts.items()) / sum(counts.values())
    return {"accuracy": float(run.summary["test_accuracy"]), "loss": loss, "staleness": mean}


def cases() -> Iterator[tuple[str, str, int]]:
    """Yield side, case and seed of each row."""
    for seed in SEEDS:
        yield from ((rule, attack, seed) for rule in RULES for attack in ATTACKS)
        yield from ((f"strength {strength}", str(replicas), seed) for replicas in STALE for strength in STRENGTHS)


def measure(sheet: Sheet) -> None:
    """Measure the rows that are not there."""
    for side, case, seed in cases():
        if sheet.find(side, case, seed) is not None:
            continue
        if side in RULES:
            found = {"accuracy": accuracy_under(case, RULES[side], seed), "loss": "", "staleness": ""}
        else:
            found = stale_figures(int(case), side.removeprefix("strength "), seed)
        sheet.put({"side": side, "case": case, "seed": seed} | found | machine())
        print(sheet.find(side, case, seed), flush=True)


# ------------------------------------------------------------------------------------------------------------- the page


def of(rows: Sequence[Row], side: str, case: str, figure: str) -> list[float]:
    """Return a figure of all seeds."""
    return [float(row[figure]) for row in rows if (row["side"], row["case"]) == (side, case)]


def page(sheet: Sheet, folder: Path) -> None:
    """Write README.md from the rows."""
    rows, accuracies, stale = sheet.rows, [], []
    for rule, policy in RULES.items():
        found = [of(rows, rule, attack, "accuracy") for attack in ATTACKS]
        accuracies.append((rule, f"`{policy}`", *(f"{median(each):.1%}" if each else "" for each in found)))
    for strength in STRENGTHS:
        cells = []
        for replicas in map(str, STALE):
            side = f"strength {strength}"
            accuracy, loss = (of(rows, side, replicas, figure) for figure in ("accuracy", "loss"))
            cells += [f"{median(accuracy):.1%}", f"{median(loss):.4f}"] if accuracy else ["", ""]
        stale.append(("asynchronous" if strength == "none" else f"λ = {strength}", *cells))
    attack_table = grid(("", "aggregation", *ATTACKS), accuracies)
    means = {replicas: of(rows, "strength none", str(replicas), "staleness") for replicas in STALE}
    said = [f"staleness {median(each):.1f}" if each else f"{replicas} replicas" for replicas, each in means.items()]
    heads = [f"{what}, {whose}" for whose in said for what in ("accuracy", "loss")]
    parts = [HEAD, attack_table, STALE_HEAD, grid(("", *heads), stale), f"Machine: {described(rows)}."]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


HEAD = f"""# Updates that are no sum

    python benchmarks/reducers/measure.py
    python benchmarks/reducers/measure.py --page

## Replicas that lie

{REPLICAS} replicas with batch 32 train `digits` for {STEPS} steps. {LIARS} of them send five times the gradient the
other way (flipped), or twenty times that of noise with random labels. Test accuracy, medians of {len(SEEDS)} seeds."""

STALE_HEAD = f"""## Stale gradients, compensated

Asynchronous replicas whose steps take exponential times make {EPOCHS} passes over `digits`; without
compensation, and with `delay-compensated:strength=λ`. Test accuracy and test loss, medians of {len(SEEDS)} seeds."""


def main() -> None:
    """Measure, or write the page."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--page", action="store_true", help="write README.md from the rows")
    sheet = Sheet(HERE / "results" / "reducers.csv", ("side", "case", "seed"))
    if not made.parse_args().page:
        measure(sheet)
    page(sheet, HERE)


if __name__ == "__main__":
    main()
