"""The page: a table for each number of workers, one beside torch, one of single samples."""

from collections.abc import Iterator, Sequence

from kit.machine import described
from kit.sheet import Row
from kit.words import bullets, grid
from latency import MODELS, WAYS
from meshes import HEADS, LENGTH, MICRO_BATCHES, SAMPLES, WORDS, Mesh
from sides import ONE, OURS, THEIRS

from paceline.core.formatting import amount

HEAD = f"""\
# One model under every mesh

    python benchmarks/hybrid/measure.py
    python benchmarks/hybrid/measure.py --beside
    python benchmarks/hybrid/measure.py --latency
    python benchmarks/hybrid/measure.py --page

The first three measure into `results/` (what is there is not measured again without `--again`), the last writes this
page.

The model is a transformer with {HEADS} heads, {WORDS} words and {LENGTH} places. A step is {SAMPLES} samples of all
replicas together, by SGD with momentum, synchronously; every worker has one thread, and a pipeline {MICRO_BATCHES}
micro-batches.
"""

STEPS = """\
## Every mesh

On the local engine. Runs of all meshes take turns with runs of one process, and each ends with the parameters of one
process, or the script fails. *step* is the median of a run's steps, then of the runs; *÷ one* the median of the rounds'
ratios. *predicted* is what virtual time makes of measured pieces (`engine="virtual", times="measured"`), measured anew
in each round, where each worker has a core of its own. *sent* is by all workers in a step; *parameters*, *kept for
backward* and *memory* are the largest of a worker's.
"""

BESIDE = """\
## Beside torch

The distributed engine on `shm` and on Gloo, and torch on Gloo: `parallelize_module` for shards, `fully_shard` (FSDP2)
for replicas, `Schedule1F1B` for stages, and where stages and replicas meet one all-reduce of all gradients after the
schedule, since DDP and FSDP2 would reduce with each micro-batch. All are cut at the same layers. They take turns of a
few steps in the same processes; a side's time is the median of a turn on its slowest rank, then of all turns, and a
ratio the median of the turns' ratios. Before that each makes a few steps from the same A_0, and the script fails where
a parameter differs from one process's.
"""

LATENCY = """\
## A single sample

A call of `paceline.predictor`, whose workers have been there for a while, from the asker's side: the input goes to
other processes and the output comes back. Of several replicas one answers, so two are as quick as one process. Only
shards can make a single sample quicker: stages take one after the other.
"""


def page(steps: Sequence[Row], sides: Sequence[Row], calls: Sequence[Row]) -> str:
    """The whole text."""
    parts = [HEAD]
    if steps:
        parts += [STEPS, _machine(steps), *_tables(steps), _predicted(steps)]
    if sides:
        parts += [BESIDE, _machine(sides), _beside(sides)]
    if calls:
        parts += [LATENCY, _machine(calls), _calls(calls)]
    return "\n".join(parts)


def _machine(rows: Sequence[Row]) -> str:
    said = {
        name: " or ".join(sorted({row[name] for row in rows if name in row})) for name in ("rounds", "layers", "width")
    }
    model = f" {said['layers']} layers, {said['width']} wide." if said["layers"] else ""
    return f"Machine: {described(rows)}. {said['rounds']} rounds.{model}\n"


def _mesh(row: Row) -> Mesh:
    return Mesh(*(int(row[name]) for name in Mesh._fields))


def _sorted(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (_mesh(row).workers, *(-each for each in _mesh(row))))


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    for count in sorted({_mesh(row).workers for row in rows}):
        some = [row for row in _sorted(rows) if _mesh(row).workers == count]
        shared = any(count > int(row["cores"]) for row in some)
        rule = f"They share {some[0]['cores']} cores: more of them are no faster; what is held and sent stays true.\n\n"
        yield f"### {count} workers\n\n{rule if shared else ''}{_table(some)}\n"


def _table(rows: Sequence[Row]) -> str:
    head = (*Mesh._fields, "step, ms", "÷ one", "predicted, ms", "sent", "parameters", "kept for backward", "memory")
    sizes = ("sent_bytes", "parameter_bytes", "saved_bytes", "memory_bytes")
    return grid(
        head,
        [
            (
                *_mesh(row), f"{float(row['step_ms']):.2f}", f"**{row['of_one']}**", _ms(row["predicted_ms"]),
                *(amount(int(row[name])) if int(row[name]) else "" for name in sizes),
            )
            for row in rows
        ],
    )  # fmt: skip


def _ms(text: str) -> str:
    return f"{float(text):.2f}" if text else ""


def _predicted(rows: Sequence[Row]) -> str:
    """How far the predictions are off."""
    lines = [
        f"{_mesh(row).strategy}: measured {ratio} of what was predicted{_missed(float(ratio))}"
        for row in _sorted(rows)
        if (ratio := row["of_predicted"])
    ]
    return (
        f"### What was predicted\n\nIt is to be within 10 % of what is measured.\n\n{bullets(lines)}\n" if lines else ""
    )


def _missed(ratio: float) -> str:
    return "" if abs(1 / ratio - 1) <= 0.1 else " (missed)"


def _beside(rows: Sequence[Row]) -> str:
    order = [OURS, THEIRS, ONE]
    rows = sorted(
        _sorted(rows),
        key=lambda row: (
            _mesh(row).workers,
            *(-each for each in _mesh(row)),
            row["backend"] != "shm",
            order.index(row["side"]),
        ),
    )
    head = (*Mesh._fields, "backend", "side", "step, ms", "÷ one", "÷ torch")
    lines = [
        (
            *_mesh(row),
            row["backend"] if row["side"] == OURS else "",
            row["side"],
            _ms(row["step_ms"]),
            f"**{row['of_one']}**",
            row["of_torch"],
        )
        for row in rows
    ]
    return f"{grid(head, lines)}\n"


def _calls(rows: Sequence[Row]) -> str:
    rows = sorted(rows, key=lambda row: ([*MODELS].index(row["model"]), [*WAYS].index(row["way"])))
    lines = [(row["model"], row["way"], f"{float(row['call_ms']):.3f}", f"**{row['of_one']}**") for row in rows]
    return f"{grid(('model', 'strategy', 'call, ms', '÷ one'), lines)}\n"
