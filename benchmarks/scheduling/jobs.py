"""Six jobs on shared workers: the simulated seconds that a scheduler needs until their mean loss is low."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from kit.sheet import Row
from kit.words import grid

from paceline import Program, SharedRuns, share_workers
from paceline.datasets import load_program

SIDES = ("cyclic", "uniform", "priority")
NEAR = (1.0, 0.5, 0.2)
"""Mean losses."""

CASES: dict[str, tuple[Sequence[float], float]] = {
    "learning rates 0.2 to 0.006": ([0.2 / 2**k for k in range(6)], 45.0),
    "learning rate 0.05 for all": ([0.05] * 6, 20.0),
    "learning rate 0.2 for five, 0.006 for one": ([0.2] * 5 + [0.2 / 2**5], 30.0),
}
"""Learning rates of the digits models, and simulated seconds."""


def jobs_of(rates: Sequence[float], seed: int) -> dict[str, Program]:
    """Return the digits program with these learning rates; each job has a start and an order of data of its own."""
    program = load_program("digits")
    return {
        f"digits-{k}": replace(
            program.seeded(6 * seed + k), optimizer=functools.partial(torch.optim.SGD, lr=rate), test=None
        )
        for k, rate in enumerate(rates)
    }


def shared(case: str, side: str, seed: int) -> dict[str, Any]:
    """Return the simulated seconds to each mean loss, and mean and largest loss at the end."""
    rates, seconds = CASES[case]
    result = share_workers(
        jobs_of(rates, seed), "replicas=2", engine="virtual", seconds=seconds, slice_steps=50, scheduler=side,
        times="compute=0.01 transfer=0 apply=0 gradient=0", seed=seed, progress=False,
    )  # fmt: skip
    return figures(result)


def figures(result: SharedRuns) -> dict[str, Any]:
    """Return the same of any jobs; one that had no slice by some moment has the loss of its start."""
    losses = {job: own[0].records[0].train_loss or 0.0 for job in result.jobs if (own := result.of(job))}
    found: dict[str, Any] = {f"seconds_{near}": "" for near in NEAR}
    now = 0.0
    for each in result.slices:
        now += each.seconds
        losses[each.job] = each.records[-1].train_loss or 0.0
        for near in NEAR:
            if sum(losses.values()) / len(result.jobs) <= near and found[f"seconds_{near}"] == "":
                found[f"seconds_{near}"] = round(now, 6)
    return found | {"mean": sum(losses.values()) / len(losses), "largest": max(losses.values()), "jobs": len(losses)}


def table(rows: Sequence[Row], case: str) -> str:
    """Medians over seeds, and the range of the seconds to the lowest mean loss."""
    lines = []
    for side in SIDES:
        found = [row for row in rows if (row["side"], row["case"]) == (side, case)]
        cells = [_seconds(found, near) for near in NEAR]
        ends = [f"{median(float(row[name]) for row in found):.3f}" if found else "" for name in ("mean", "largest")]
        lines.append((f"`{side}`", *cells, _range(found), *ends))
    heads = [f"mean loss {near:g}" for near in NEAR]
    return grid(("scheduler", *heads, "from .. to", "mean at the end", "largest at the end"), lines)


def _seconds(rows: Sequence[Mapping[str, str]], near: float) -> str:
    if not rows:
        return ""
    value = median(float(row[f"seconds_{near}"] or "inf") for row in rows)
    return f"{value:.1f} s" if value < float("inf") else "not reached"


def _range(rows: Sequence[Mapping[str, str]]) -> str:
    found = [row[f"seconds_{NEAR[-1]}"] for row in rows]
    return f"{min(map(float, found)):.1f} .. {max(map(float, found)):.1f}" if found and all(found) else ""
