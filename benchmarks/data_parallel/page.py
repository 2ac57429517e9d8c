"""The page: step times, payload and memory of all sides, and what is slower than DDP on Gloo."""

from collections.abc import Iterator, Sequence

from kit.machine import described
from kit.sheet import Row
from kit.words import bullets, grid
from models import MODELS
from sides import AGAINST, DEFAULT, SIDES

MLP_AIM = 0.7
"""Of DDP's time on Gloo, where communication is the bound."""

HEAD = f"""\
# A synchronous step: Paceline's distributed engine beside DDP, Accelerate and Fabric

    pip install accelerate lightning-fabric
    python benchmarks/data_parallel/measure.py
    python benchmarks/data_parallel/measure.py --memory
    python benchmarks/data_parallel/measure.py --divided
    python benchmarks/data_parallel/measure.py --page

Three tables, each measured into a file in `results/` (what is there is not measured again without `--again`), and the
page that is written from them. Without Accelerate or Fabric their rows are left out.

- `{DEFAULT}`: the distributed engine as it is by itself, with no backend named; beside it with one named and all of the
  optimizer's state on each rank, or divided among the ranks (ZeRO-1). Under torchrun it is the same engine.
- `{AGAINST}` and `ddp shm`: `DistributedDataParallel` with its defaults on a group of that backend.
- `accelerate gloo` and `fabric gloo`: as their users write a loop of their own; underneath both use DDP on Gloo.
- `alone`: the same processes without communication. Nothing can be faster but by chance, or by spending less on the
  optimizer.

All sides take turns in the same processes, one thread each, from the same A_0, with the same one batch a rank again and
again, so data cost no time on any side: SGD with momentum 0.9 on `cnn` (22k parameters), `transformer` (0.4M) and `mlp`
(5.8M). A step's time is the median of a turn on its slowest rank, then of all turns; a ratio is the median of the
turns' ratios to `{AGAINST}`, so below 1 is quicker. After the first turn of each side its parameters are compared with
DDP's on each rank: the script fails where one differs by more than 1e-5.
"""

MEMORY = """\
Payload is what all ranks together send in a step: Paceline's as `run.summary` has it (for each collective that was
made, what a ring sends for it), the others' by the ring's formula 2·(P−1)·|A|·4 bytes, which is not measured. Memory
is the peak of the fullest rank (`VmHWM`, shared pages in it) in processes that do nothing but one short turn of this
side, all imports in it; `alone` is what torch, the model and a Gloo group take without DDP.
"""

DIVIDED = """\
## When dividing the optimizer's state pays

One matrix of so many elements and a batch of one sample, so that the update and its transport are all that takes time.
Milliseconds of a step with the whole state on each rank (all-reduce of Δ, each rank makes the whole step) and divided
(reduce-scatter, a part of the step, all-gather of A; on shm ranks share A, and wait for each other instead); below 1
dividing is quicker. What it always saves is memory: of SGD's momentum 4·(1 − 1/P) bytes an element, of Adam's two
moments twice that; on shm as many bytes of A itself.
"""


def page(steps: Sequence[Row], peaks: Sequence[Row], parts: Sequence[Row]) -> str:
    """The whole text, of what has been measured so far."""
    memory = {_key(row): row["peak_mib"] for row in peaks}
    sections = [HEAD, f"Machine: {described([*steps, *peaks, *parts])}.{_beside(steps)} {_turns(steps)}\n"]
    if steps:
        sections += [_ratios(steps), _slower(steps), _mlp(steps), f"## All figures\n\n{MEMORY}"]
        sections += [_details(steps, memory, model) for model in MODELS]
    if parts:
        sections.append(_divided(parts))
    return "\n".join(section for section in sections if section)


def _beside(steps: Sequence[Row]) -> str:
    versions = sorted({row["version"] for row in steps if row["version"]})
    return f" Beside: {', '.join(versions)}." if versions else " Neither Accelerate nor Fabric was installed."


def _turns(steps: Sequence[Row]) -> str:
    pairs = sorted({int(row["pairs"]) for row in steps})
    return f"{' or '.join(map(str, pairs))} turns of each side." if pairs else ""


def _ratios(steps: Sequence[Row]) -> str:
    found = {_key(row): row["ratio"] for row in steps}
    sides = [side for side in SIDES if any(row["side"] == side for row in steps)]
    rows = [
        (model, batch, ranks, *(_two(found.get((model, ranks, batch, side))) for side in sides))
        for model, batch, ranks in _cells(steps)
    ]
    return f"## Step time, of DDP's on Gloo\n\n{grid(('model', 'batch', 'ranks', *sides), rows)}\n"


def _two(text: str | None) -> str:
    return "" if text is None else f"{float(text):.2f}"


def _slower(steps: Sequence[Row]) -> str:
    mine = [row for row in steps if row["side"] == DEFAULT]
    slower = [f"{_name(row)}: {float(row['ratio']):.3f}" for row in mine if float(row["ratio"]) > 1]
    return f"## Where `{DEFAULT}` is slower than DDP on Gloo: {len(slower)} of {len(mine)} rows\n\n{bullets(slower)}\n"


def _mlp(steps: Sequence[Row]) -> str:
    """The bound by communication; one rank has none."""
    mine = [row for row in steps if row["side"] == DEFAULT and row["model"] == "mlp" and row["ranks"] != "1"]
    lines = [f"{_name(row)}: {float(row['ratio']):.2f}{_verdict(float(row['ratio']))}" for row in mine]
    return f"## The MLP: at most {MLP_AIM} is the aim\n\n{bullets(lines)}\n"


def _verdict(ratio: float) -> str:
    return "" if ratio <= MLP_AIM else " (missed)"


def _details(steps: Sequence[Row], memory: dict[tuple[str, ...], str], model: str) -> str:
    order = list(SIDES)
    rows = sorted(
        (row for row in steps if row["model"] == model),
        key=lambda row: (int(row["batch"]), int(row["ranks"]), order.index(row["side"])),
    )
    if not rows:
        return ""
    head = ("batch", "ranks", "side", "step, ms", "ratio", "payload, bytes a step", "by", "peak, MiB a rank")
    lines = [
        (
            row["batch"], row["ranks"], row["side"], f"{float(row['step_ms']):.2f}", _two(row["ratio"]),
            f"{int(row['payload_bytes']):,}", row["payload_by"], memory.get(_key(row), ""),
        )
        for row in rows
    ]  # fmt: skip
    return f"### `{model}`, {int(rows[0]['parameters']):,} parameters\n\n{grid(head, lines)}\n"


def _divided(parts: Sequence[Row]) -> str:
    rows = sorted(parts, key=lambda row: (row["optimizer"], row["backend"], int(row["ranks"]), int(row["elements"])))
    lines = [
        (
            row["optimizer"], row["backend"], row["ranks"], f"{int(row['elements']):,}",
            _two(row["whole_ms"]), _two(row["divided_ms"]), _two(row["ratio"]),
        )
        for row in rows
    ]  # fmt: skip
    head = ("optimizer", "backend", "ranks", "elements of A", "whole, ms", "divided, ms", "divided ÷ whole")
    return f"{DIVIDED}\n{grid(head, lines)}\n"


def _cells(steps: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    found = {(row["model"], row["batch"], row["ranks"]) for row in steps}
    order = list(MODELS)
    yield from sorted(found, key=lambda cell: (order.index(cell[0]), int(cell[1]), int(cell[2])))


def _name(row: Row) -> str:
    return f"{row['model']}, batch {row['batch']}, {row['ranks']} ranks"


def _key(row: Row) -> tuple[str, ...]:
    return row["model"], row["ranks"], row["batch"], row["side"]
