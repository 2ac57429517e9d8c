"""The page: a table for each number of workers."""

from collections.abc import Sequence

from kit.machine import told
from kit.sheet import Row
from kit.words import grid
from meshes import HEADS, LENGTH, SAMPLES, WORDS

from paceline.replica.amounts import amount

HEAD = """\
# One model under every mesh

    python benchmarks/hybrid/measure.py
    python benchmarks/hybrid/measure.py --page

The first measures into `results/` (what is there is not measured again without `--again`), the second writes
this page.

A transformer of {layers} layers, {width} wide, with {heads} heads, {words} words and {length} places; a step is
{samples} samples of all replicas together, by SGD with momentum, synchronously, on the local engine; every
worker has one thread and a pipeline 4 micro-batches. Runs of all meshes take turns with runs of one process,
and each ends with the parameters of one process, or the script fails. *step* is the median of a run's steps,
then of the runs; *÷ one* the median of the rounds' ratios. *sent* is by all workers in a step; *parameters*,
*kept for backward* and *memory* are the largest of a worker's. Where there are more workers than cores they
share them, so a step is then no quicker; what they hold and send stays true.
"""


def page(rows: Sequence[Row]) -> str:
    """The whole text."""
    counts = sorted({_workers(row) for row in rows})
    said = {name: " or ".join(sorted({row[name] for row in rows})) for name in ("layers", "width", "rounds")}
    head = HEAD.format(heads=HEADS, words=WORDS, length=LENGTH, samples=SAMPLES, **said)
    tables = [f"## {count} workers\n\n{_table([r for r in rows if _workers(r) == count])}\n" for count in counts]
    return "\n".join([head, f"Machine: {told(rows)}. {said['rounds']} rounds.\n", *tables])


def _workers(row: Row) -> int:
    return int(row["replicas"]) * int(row["stages"]) * int(row["shards"])


def _table(rows: Sequence[Row]) -> str:
    head = ("replicas", "stages", "shards", "step, ms", "÷ one", "sent", "parameters", "kept for backward", "memory")
    sizes = ("sent_bytes", "parameter_bytes", "saved_bytes", "memory_bytes")
    rows = sorted(rows, key=lambda row: (-int(row["replicas"]), -int(row["stages"])))
    return grid(
        head,
        [
            (
                row["replicas"], row["stages"], row["shards"], f"{float(row['step_ms']):.2f}", f"**{row['of_one']}**",
                *(amount(int(row[name])) if int(row[name]) else "" for name in sizes),
            )
            for row in rows
        ],
    )  # fmt: skip
