"""The page, its tables and pictures, from the rows."""

from collections import defaultdict
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path
from statistics import median

from contenders import ALONE_S, CONTENDERS, PASS_S, SAMPLE_S, TARGET, TRANSFER_S, WARM_REPLICAS, WARMED
from kit.machine import described
from kit.sheet import Row, Sheet
from kit.words import grid
from matplotlib.axes import Axes

from paceline.plots.curves import PALETTE
from paceline.report.figures import drawn

KEYS = ("servers", "replicas", "side", "setting", "alone_s", "seed")
"""Columns that say which run a row is of."""

BATCH_KEYS = ("replicas", "slow", "network", "backups", "portions")
"""Those of the seconds of a batch."""

COLOURS = dict(zip(CONTENDERS, PALETTE, strict=False))


def medians(
    rows: Sequence[Row], servers: str, replicas: int, side: str, *, alone_s: float = 0.0, least: int = 3
) -> dict[str, float]:
    """Return the median time to the target of each setting that was run with ``least`` seeds; infinity: not reached."""
    times = defaultdict[str, list[float]](list)
    for row in rows:
        if (row["servers"], row["replicas"], row["side"], row["alone_s"]) == (
            servers,
            str(replicas),
            side,
            str(alone_s),
        ):
            times[row["setting"]].append(float(row["time_s"] or inf))
    return {setting: median(found) for setting, found in times.items() if len(found) >= least}


def best(rows: Sequence[Row], servers: str, replicas: int, side: str) -> tuple[str, float] | None:
    """Return the setting that is fastest by the median of seeds, and its time; None: none has reached the target."""
    found = medians(rows, servers, replicas, side).items()
    return min((pair for pair in found if isfinite(pair[1])), key=lambda pair: pair[1], default=None)


def page(results: Path, folder: Path) -> None:
    """Write README.md and the pictures from the rows."""
    kept = {"times": KEYS, "curves": KEYS, "backups": ("policy",), "batches": BATCH_KEYS}
    rows, curves, slow, batches = (Sheet(results / f"{name}.csv", keys).rows for name, keys in kept.items())
    results.mkdir(parents=True, exist_ok=True)
    (results / "replicas.svg").write_text(times_picture(rows) + "\n", encoding="utf-8")
    (results / "accuracy.svg").write_text(curves_picture(curves) + "\n", encoding="utf-8")
    parts = [
        HEAD, times_table(rows), FOUND, SETTINGS, grids_table(), SETTINGS_FOUND, settings_table(rows),
        OVER_TIME, curves_table(curves), FEW, few_table(rows), WARM, warm_table(rows), SLOW, slow_table(slow),
        ONCE, batches_table(batches), f"Machine: {described([*rows, *curves, *slow, *batches])}.",
    ]  # fmt: skip
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- the tables


def numbers(rows: Sequence[Row], servers: str) -> list[int]:
    """Return the numbers of replicas for which there are rows."""
    return sorted({int(row["replicas"]) for row in rows if row["servers"] == servers})


def said(time_s: float | None) -> str:
    """Return a time in words."""
    return (
        "not reached"
        if time_s is None or not isfinite(time_s)
        else f"{time_s:.1f}"
        if time_s >= 10
        else f"{time_s:.2f}"
    )


def bold_least(values: Sequence[float | None]) -> list[str]:
    """Return times in words, the least in bold face."""
    least = min((value for value in values if value is not None), default=inf)
    return [f"**{said(value)}**" if value == least else said(value) for value in values]


def times_table(rows: Sequence[Row]) -> str:
    """Return seconds to the target of each contender's best setting, by replicas."""
    lines = []
    for replicas in numbers(rows, "each"):
        found = [best(rows, "each", replicas, side) for side in CONTENDERS]
        lines.append([replicas, *bold_least([pair[1] if pair else None for pair in found])])
    return grid(("replicas", *CONTENDERS), lines)


def settings_table(rows: Sequence[Row]) -> str:
    """Return the best settings."""
    lines = []
    for replicas in numbers(rows, "each"):
        found = [best(rows, "each", replicas, side) for side in CONTENDERS]
        lines.append([replicas, *(pair[0] if pair else "" for pair in found)])
    return grid(("replicas", *CONTENDERS), lines)


def grids_table() -> str:
    """Return what was tried."""
    lines = []
    for side, contender in CONTENDERS.items():
        size, rate, history = (sorted({each[k] for each in contender.grid}) for k in range(3))
        what = "portions for each replica" if contender.whole else "samples of a Δ"
        cells = [", ".join(f"{each:g}" for each in values) for values in (size, rate)]
        also = f"; history {', '.join(map(str, history))}" if any(history) else ""
        lines.append((side, f"`{contender.policy}`", f"{what}: {cells[0]}", cells[1] + also))
    return grid(("", "policy", "size", "learning rate"), lines)


def few_table(rows: Sequence[Row]) -> str:
    """Return the times where there are fewer servers than replicas, and where there are as many."""
    few = sorted({row["servers"] for row in rows} - {"each"}, key=int)
    lines = []
    for replicas in sorted({n for servers in few for n in numbers(rows, servers)}):
        for servers in ("each", *few):
            found = [best(rows, servers, replicas, side) for side in CONTENDERS]
            count = f"{replicas}" if servers == "each" else servers
            lines.append([replicas, count, *bold_least([pair[1] if pair else None for pair in found])])
    return grid(("replicas", "servers", *CONTENDERS), lines)


def warm_table(rows: Sequence[Row]) -> str:
    """Return the times of Downpour by learning rate, with and without a warm start."""
    lines = []
    for side in WARMED:
        rates = sorted({setting.rate for setting in CONTENDERS[side].grid})
        for replicas in WARM_REPLICAS:
            for alone_s in (0.0, ALONE_S):
                times = medians(rows, "each", replicas, side, alone_s=alone_s)
                warmed = {text.split("; ")[0] for text in medians(rows, "each", replicas, side, alone_s=ALONE_S)}
                own = {float(text.split("; ")[1]): t for text, t in times.items() if text.split("; ")[0] in warmed}
                cells = (f"{rate:g}: {said(own[rate])}" if rate in own else "" for rate in rates)
                lines.append([side, replicas, f"{alone_s:g} s", *cells])
    return grid(("", "replicas", "one replica alone for", *(["rate: seconds"] * 4)), lines)


def slow_table(rows: Sequence[Row]) -> str:
    """Return seconds of a batch over the ideal, with and without backups."""
    of = {row["policy"]: float(row["over_ideal"]) for row in rows}
    names = sorted({int(row["portions"]) for row in rows if row["policy"].startswith("sandblaster")})
    policy = "sandblaster:portions={}{}"
    lines = [
        (n, *(f"{of[p]:.2f}" if (p := policy.format(n, also)) in of else "" for also in ("", ",backups=false")))
        for n in names
    ]
    if "synchronous" in of:
        lines.append(("8, `synchronous`", "", f"{of['synchronous']:.2f}"))
    return grid(("portions", "with backups", "without"), lines)


def batches_table(rows: Sequence[Row]) -> str:
    """Return seconds of a batch by portions for each replica; the least of each row in bold face."""
    of = {tuple(row[name] for name in BATCH_KEYS): float(row["batch_s"]) for row in rows}
    words = {"TrueTrue": "once", "TrueFalse": "once, no backups", "FalseTrue": "for each portion"}
    portions = sorted({row["portions"] for row in rows}, key=int)
    lines = []
    for *how, network, backups in dict.fromkeys(key[:4] for key in of):
        who = f"{how[0]}, an eighth slow" if how[1] == "True" else how[0]
        times = bold_least([of.get((*how, network, backups, n)) for n in portions])
        lines.append((who, words[network + backups], *times))
    return grid(("replicas", "A is sent", *(f"{n} for each" for n in portions)), lines)


# -------------------------------------------------------------------------------------------------------- the curves


Curve = list[tuple[float, float]]


def curve(rows: Sequence[Row], replicas: int, side: str) -> Curve:
    """Return times and test accuracies, medians of the seeds."""
    own = [row for row in rows if (row["replicas"], row["side"]) == (str(replicas), side)]
    at = defaultdict[float, list[float]](list)
    for row in own:
        for time_s, accuracy in zip(row["all_time_s"].split(), row["all_test_accuracy"].split(), strict=True):
            at[float(time_s)].append(float(accuracy))
    # What a run has besides, a record at its last update, is not of all seeds.
    return [(time_s, median(found)) for time_s, found in sorted(at.items()) if len(found) == len(own)]


def curves_table(rows: Sequence[Row]) -> str:
    """Return the test accuracy after parts of the time."""
    lines = []
    for replicas in sorted({int(row["replicas"]) for row in rows}):
        found = {side: curve(rows, replicas, side) for side in CONTENDERS}
        end = max((points[-1][0] for points in found.values() if points), default=0.0)
        for part in (0.1, 0.2, 0.4, 0.7, 1.0):
            at = [
                [accuracy for time_s, accuracy in points if time_s <= part * end * 1.001] for points in found.values()
            ]
            lines.append((replicas, f"{part * end:.3g} s", *(f"{own[-1]:.1%}" if own else "" for own in at)))
    return grid(("replicas", "after", *CONTENDERS), lines)


def curves_picture(rows: Sequence[Row]) -> str:
    """Return test accuracy over time for each number of replicas, as SVG (figure 3)."""
    counts = sorted({int(row["replicas"]) for row in rows}) or [0]

    def draw(axes: list[Axes]) -> None:
        for own, replicas in zip(axes, counts, strict=True):
            for side in CONTENDERS:
                points = curve(rows, replicas, side)
                own.plot([t for t, _ in points], [100 * a for _, a in points], color=COLOURS[side], label=side)
            own.set_title(f"{replicas} replicas", loc="left")
            own.set_ylim(60, 100)
        axes[-1].set_xlabel("seconds of virtual time")
        axes[-1].legend(frameon=False, loc="lower right")

    title = "Test accuracy, %"
    return drawn(draw, title, rows=len(counts), height_in=4.8, says="test accuracy over time of each contender")


def times_picture(rows: Sequence[Row]) -> str:
    """Return the time to the target over replicas, as SVG (figure 4)."""

    def draw(axes: list[Axes]) -> None:
        counts = numbers(rows, "each")
        for side in CONTENDERS:
            found = [(n, pair[1]) for n in counts if (pair := best(rows, "each", n, side))]
            style = {"color": COLOURS[side], "marker": "o", "markersize": 3}
            axes[0].plot([n for n, _ in found], [t for _, t in found], label=side, **style)
        axes[0].set_xscale("log", base=2)
        axes[0].set_yscale("log", base=2)
        axes[0].set_xticks(counts, list(map(str, counts)))
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].set_xlabel("replicas")
        axes[0].legend(frameon=False)

    title = f"Seconds of virtual time to a test loss of {TARGET:g}"
    return drawn(draw, title, height_in=3.8, says="time to the target of each contender over replicas")


# ------------------------------------------------------------------------------------------------------------ the text


HEAD = f"""# Sandblaster L-BFGS beside Downpour

What DistBelief compares (Dean et al., NIPS 2012, section 5, figures 3 and 4), in small: Downpour SGD, the same with
Adagrad, and L-BFGS by Sandblaster, on as many replicas; besides, synchronous SGD, and plain gradient descent by
Sandblaster. Times are virtual. What is said here of the paper is from memory, not checked against its text.

    python benchmarks/sandblaster/measure.py
    python benchmarks/sandblaster/measure.py --page
    python benchmarks/sandblaster/measure.py --data FOLDER --out FOLDER     # MNIST instead of digits

A 64-64-10 perceptron learns scikit-learn's digits: 1,024 to train, 773 to test. Measured is when the test loss is first
{TARGET:g} or less, at a test accuracy of about 95 %; of each contender with the best of 12 settings, by the median of 3
seeds. A is evaluated so often that times are exact to 1 % with 256 replicas, and to 4 % with one.

What takes time is the same for all:

- a sample takes {1e3 * SAMPLE_S:.2f} ms, and each batch 10 % more or less (standard deviation);
- A or Δ is on its way for {1e3 * TRANSFER_S:.0f} ms, as long as {TRANSFER_S / SAMPLE_S:.0f} samples take;
- A is in as many servers as there are replicas, P, one on the host of each. A pass over A or Δ takes them
  {1e3 * PASS_S:.1f} ms / P. A Δ costs 3 passes; an update costs 3 more for SGD of a sum, 2 more for Downpour's Adagrad,
  and 100 more for L-BFGS.

These follow from 42 million parameters, the size of the paper's model of speech, at 6 FLOP and 4 bytes each, and from
rates assumed for hosts of 2012, neither measured nor of the paper: 100 GFLOP/s, links of 10 Gbit/s, memory of 20 GB/s.
It is the ratio that matters, and that does not depend on the size of the model.

## Time to the target (figure 4)

![Time to the target over replicas](results/replicas.svg)

Seconds of virtual time to a test loss of {TARGET:g}; the least of each row in bold face:"""

FOUND = """Reproduced of the paper:

- **With few replicas Downpour with Adagrad is the fastest**: up to 32 by the median, at 8 with synchronous SGD. At 16
  each of its seeds is faster than each of L-BFGS; at 32 they overlap.
- **Downpour SGD needs more replicas for the same time**: 5 s take 4 replicas with Adagrad, and 16 with SGD or by
  Sandblaster L-BFGS. With 256 the two Downpours differ by less than their seeds do.
- **Sandblaster L-BFGS scales further, and overtakes**: from 64 replicas on each of its seeds is faster than any seed of
  any other. From 64 to 256 it gains 13 %, Downpour and synchronous SGD less than 10 %. The paper expects that of some
  30,000 cores. It comes so early as all samples are few: 16 for each of 64 replicas, and 8 evaluations suffice.

Otherwise than one may expect from it:

- **Synchronous SGD**, which the paper does not have, is faster than Downpour SGD from 8 replicas on, by 8 to 21 %:
  nobody is slow here, and staleness costs more than waiting. One slow replica makes its rounds 4.5 times as long
  ([below](#backup-portions)).
- **It is less L-BFGS than the batch of all samples that scales**: by gradient descent, too, 256 replicas are faster
  than Downpour; L-BFGS takes 16 to 19 % less time than that from 64 on.
- **One portion for each replica was always best.** No replica is slow, and each portion costs a push, as long as 53
  samples, and here a pull, too, where the paper's replicas fetch A once a batch. One is best also
  [where A is sent once](#portions-where-a-is-sent-once), unless a replica is slow. So Sandblaster is here a round in
  lockstep."""

SETTINGS = """## Settings

A grid of 12 for each contender at each number P of replicas. The rate of Downpour SGD is divided by P, for its P
updates move A as far as one of all; that of Adagrad by √P. All 12 are run with one seed, the two fastest with three.
Rates of Downpour and synchronous SGD were moved once, as the best had been at an edge, or another one for each P. Sizes
were not: 128 samples are an edge with up to 4 replicas, and 8 are one with many."""

SETTINGS_FOUND = """The best of them (size; rate; history):"""

OVER_TIME = """## Accuracy over time (figure 3)

![Test accuracy over time](results/accuracy.svg)

Test accuracy with the settings that are best for the time to the target, medians of 3 seeds. L-BFGS begins last, for
its first step is short, 1 / Σ|g|; with 64 replicas it has caught up before 95 %:"""

FEW = """## Fewer servers than replicas

As above, but with A in 8 servers, whose links carry one Δ at a time, and where all wait for A, then A to one at a time.
Downpour's replicas send and receive at once. Then Downpour with Adagrad is faster than L-BFGS, by 45 %, and synchronous
SGD the slowest but one: who overtakes whom depends on the servers, too."""

WARM = f"""## Warm start

The paper starts Downpour with one replica, and lets the others join later. Here they join after {ALONE_S:g} s, which
count. Seconds to the target by learning rate, with the best number of samples. It does not help here: no rate becomes
usable by it, and of the seven that are usable without six are slower, by about what it takes, two of them beyond the
limit (7.5 s with 64 replicas, 5 s with 256)."""

SLOW = """## Backup portions

One of 8 replicas takes 5 s for a portion, the others 1 s. Seconds of a batch, over those if nobody ever waited
(portions ÷ 7.2 s). Without backups it depends on when the slow one begins its last portion, at the worst at the end:"""

ONCE = """## Portions where A is sent once

Above, a replica pulls A for each portion. Over a network in virtual time (`times="network=..."`) it is sent once a
batch, and a portion more costs a push alone. Mean seconds of 8 batches of L-BFGS, as many as the target takes. Hosts'
links carry one slice of an A or a Δ at a time, and so wait for each other: rows of one and the same number of replicas
compare portions, not ways to send. A single replica is on the host of the only server, and sends inside it.

- **Where no replica is slow one portion for each stays the best**: from 8 replicas on a second one costs 0.14 to 0.16 s
  a batch over the network, and 0.27 to 0.29 s where it pulls A, too.
- **Where one of 8 is slow, five times as long for a sample, two are better than one by 7 %**, but only where A is sent
  once; where it is pulled for each portion, one is better by 8 %.
- **Backups cost where links are what is short**: with 64 and 256 replicas of the same speed, and one portion for each,
  a batch takes 32 and 45 % longer over the network with them. What a backup sends occupies links also where the first
  result has come before it. With one slow replica of 8, and one portion for each, they save 41 %."""
