"""The page: steps and single samples beside one process and DTensor, and what is not as it is to be."""

from collections.abc import Iterator, Sequence

from kit.machine import described
from kit.sheet import Row
from kit.words import bullets, grid
from models import ROWS
from rounds import CHECKED
from sides import ONE, OURS, THEIRS, UNSENT

HEAD = f"""\
# Operators divided among shards, beside one process and DTensor

    python benchmarks/tensor/measure.py
    python benchmarks/tensor/measure.py --page

The first measures into `results/` (what is there is not measured again without `--again`), the second writes this page.

- `{OURS}`: the distributed engine, `shards=k`, on a model as it is.
- `{ONE}`: plain PyTorch with one thread, while the other ranks wait.
- `{THEIRS}`: torch's `parallelize_module` with `ColwiseParallel` and `RowwiseParallel`, written by hand for each model,
  on Gloo; it can't divide convolutions.
- `{UNSENT}`: the same shards in a plain loop, with collectives that return at once. It computes nothing sensible, and
  no step with these plans takes less.

All sides take turns of a few steps in the same processes, one thread each; a side's time is the median of a turn on its
slowest rank, then of all turns, and a ratio the median of the turns' ratios. The optimizer is SGD with momentum, the
data one batch of random numbers. Before that each makes {CHECKED} steps from the same A_0, and the script fails where a
parameter differs from one process's, or where none has moved. `one sample` is a forward pass without gradients of a
batch of one; Paceline's is a predictor's, which leaves it to one process where shards would not be quicker.
"""

OF_ONE = {"mlp 256": 0.6, "mlp 1024": 0.56, "transformer": 0.62}
"""Of the step of one process, at most, with 2 shards on shm."""


def page(rows: Sequence[Row]) -> str:
    """The whole text."""
    counts = sorted({int(row["shards"]) for row in rows})
    tables = [
        f"## {count} shards\n\n{_table([row for row in rows if int(row['shards']) == count])}\n" for count in counts
    ]
    asked = ", ".join(f"{most:g} times one process for `{row}`" for row, most in OF_ONE.items())
    rule = f"With 2 shards on shm at most {asked}; nowhere more than DTensor."
    aims = f"## What a step is to take\n\n{rule}\n\n{bullets(_aims(rows))}\n"
    pairs = " or ".join(sorted({row["pairs"] for row in rows}))
    return "\n".join([HEAD, f"Machine: {described(rows)}. {pairs} rounds.\n", *tables, aims])


def _table(rows: Sequence[Row]) -> str:
    order = [*ROWS]
    rows = sorted(
        rows, key=lambda row: (order.index(row["row"]), row["backend"] != "shm", row["side"] != OURS, row["side"])
    )
    head = (
        "model",
        "batch",
        "backend",
        "side",
        "step, ms",
        "÷ one",
        "÷ DTensor",
        "one sample, ms",
        "÷ one",
        "÷ DTensor",
    )
    lines = [
        (
            row["row"], " × ".join(map(str, ROWS[row["row"]].shape)), row["backend"] if row["side"] == OURS else "",
            row["side"], f"{float(row['step_ms']):.2f}", f"**{row['of_one']}**", row["of_dtensor"],
            f"{float(row['forward_ms']):.3f}", row["forward_of_one"], row["forward_of_dtensor"],
        )
        for row in rows
    ]  # fmt: skip
    return grid(head, lines)


def _aims(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["side"] != OURS or row["backend"] != "shm" or row["shards"] != "2":
            continue
        most = OF_ONE.get(row["row"])
        if most is not None:
            yield _line(f"{row['row']}: {row['of_one']} of one process", float(row["of_one"]) <= most)
        if row["of_dtensor"]:
            yield _line(f"{row['row']}: {row['of_dtensor']} of DTensor", float(row["of_dtensor"]) <= 1)


def _line(words: str, met: bool) -> str:
    return words if met else f"{words} (missed)"
