"""The page: step times beside the ideal and torch's, memory, and what is not as it is to be."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import aims
from checks import STEPS as CHECKED
from kit.machine import described
from kit.sheet import Row
from kit.words import bullets, grid
from models import LAYERS, MICRO_BATCHES, SIZES
from saved import WAYS
from sides import OURS, SCHEDULES, THEIRS, THEIRS_ON_GLOO

HEAD = f"""\
# A step of a pipeline: Paceline beside torch.distributed.pipelining and beside the ideal

    python benchmarks/pipeline/measure.py
    python benchmarks/pipeline/measure.py --memory
    python benchmarks/pipeline/measure.py --swimlane
    python benchmarks/pipeline/measure.py --page

Times and memory are measured into files in `results/` (what is there is not measured again without `--again`), the
third command draws a step, and the last writes this page.

The model is an `nn.Sequential` of {LAYERS} transformer layers (norm, attention, norm, MLP four times as wide; no
dropout), trained in float32 by SGD with momentum 0.9 on the mean square of its error, on one mini-batch of random
numbers again and again, so data cost no time on any side. A step is {MICRO_BATCHES} micro-batches and the update.

{{sizes}}

- `{OURS}`: the distributed engine, `stages=P micro_batches={MICRO_BATCHES} schedule=…`. Under torchrun it is the same.
- `{THEIRS}`: `ScheduleGPipe`, `Schedule1F1B` and `ScheduleInterleaved1F1B` of torch.distributed.pipelining, with
  stages written by hand and their shapes given; outputs are not collected. It sends by the same backend; `shm` is ours,
  so there it stands once more, `{THEIRS_ON_GLOO}`, as people have it.
- `paceline, 1f1b` takes turns with zero-bubble, which torch does not have by the same rule.
- All cut the model at the same layers, into equal parts; interleaved ones into two parts a rank.

All sides of a schedule take turns of a few steps in the same processes, one thread each. A step's time is the median of
a turn on its slowest rank, then of all turns. Before that each makes {CHECKED} steps from the same A_0, and its
parameters are compared with those of one process that goes through the same micro-batches: the script fails where one
differs by more than 1e-5, or where none has gone a hundred times as far from A_0.
"""

IDEAL = """\
## How the ideal is computed

In each round every process has a turn with its own parts of the model: forward and backward of all micro-batches in the
order of the schedule, from tensors that it has made itself. Nothing is sent or waited for, but all processes work at
the same time, so each has what the machine leaves it while the others compute; and as many micro-batches are kept at
once as the schedule keeps. Of each part the median forward and the median backward are taken (until all that was kept
is let go of), and of each process the median of its optimizer's step, made by `torch.optim.SGD`. For `zero-bubble`
backward is divided: its first half is the backward of the same part while its linear layers' weights and biases need no
gradient, the second is what is left of the whole.

`paceline.schedule.simulate` then goes through the schedule with these times: each action begins when its worker is free
and what it needs is made, and sending takes no time. The ideal is when the last worker has ended its last action and
made its update. A ratio is the median of the rounds' ratios of step time to the ideal of the same round.

Where there are more processes than cores, a part's wall time says how the others got in its way. So there processor
time is taken, and the ideal is no less than all work divided by the cores.

The column `from one` is what the ideal is in its simplest form, t/P · (1 + (P − 1)/(v·m)), where t is the step of one
process that has the machine to itself and v the parts a rank has: (t/2)(m + 1)/m for two stages. It knows nothing of
what cores take from each other when all are busy, and is left out where a process has no core of its own.
"""

MEMORY = """\
## Memory

What stages keep between forward and backward: the bytes of the tensors that autograd saves and of what waits to be
computed with, parameters and the mini-batch itself not counted; the most at one time, as `run.summary` has it. Every
micro-batch has the same size, however many there are. Recomputation keeps what comes into a stage; while it makes one
forward pass again, all of that one is there, and so is that of a forward whose backward follows at once, which is not
made again.
"""


def page(steps: Sequence[Row], saved: Sequence[Row], pictures: Sequence[Path]) -> str:
    """The whole text, of what has been measured so far.

    Args:
        steps: rows of step times.
        saved: rows of memory.
        pictures: what there is in ``results/``.
    """
    head = HEAD.format(sizes=_sizes([*steps, *saved]))
    sections = [head, f"Machine: {described([*steps, *saved])}.{_turns(steps)}\n"]
    if steps:
        sections += [_table(steps, size, stages) for size, stages in _cells(steps)]
        sections += [f"## What a step is to take with 2 stages\n\n{_aims(steps)}", IDEAL]
    sections += [_lanes(path) for path in pictures if path.name.startswith("swimlane")]
    if saved:
        sections += [MEMORY, f"{bullets(aims.memory(saved))}\n"]
        sections += [f"![{path.stem}](results/{path.name})\n" for path in pictures if path.name.startswith("memory")]
        sections += [_kept(saved, size, stages) for size, stages in _cells(saved)]
    return "\n".join(section for section in sections if section)


def _sizes(rows: Sequence[Row]) -> str:
    lines = []
    for name in SIZES:
        if any(row["size"] == name for row in rows):
            size = SIZES[name]
            lines.append(
                f"`{name}`: width {size.width}, {size.heads} heads, micro-batches of {size.samples} × {size.tokens} "
                f"tokens, {4 * size.samples * size.tokens * size.width / 1024:g} KiB between two stages."
            )
    return bullets(lines)


def _turns(steps: Sequence[Row]) -> str:
    pairs = sorted({int(row["pairs"]) for row in steps})
    return f" {' or '.join(map(str, pairs))} rounds." if pairs else ""


def _cells(rows: Sequence[Row]) -> list[tuple[str, str]]:
    order = list(SIZES)
    found = {(row["size"], row["stages"]) for row in rows}
    return sorted(found, key=lambda cell: (int(cell[1]), order.index(cell[0])))


def _table(steps: Sequence[Row], size: str, stages: str) -> str:
    mine = [row for row in steps if (row["size"], row["stages"]) == (size, stages)]
    order = list(SCHEDULES)
    mine = sorted(
        mine, key=lambda row: (row["backend"] != "shm", order.index(row["schedule"]), row["side"] != OURS, row["side"])
    )
    head = (
        "backend",
        "schedule",
        "side",
        "step, ms",
        "ideal, ms",
        "step ÷ ideal",
        "÷ torch's",
        "÷ torch's on gloo",
        "from one, ms",
        "steps",
    )
    lines = [
        (
            row["backend"], row["schedule"], row["side"], _short(row["step_ms"]), _short(row["ideal_ms"]),
            f"**{float(row['of_ideal']):.3f}**", *_of_torch(row),
            _short(row["simple_ms"]) if row["clock"] == "wall" else "", row["steps"],
        )
        for row in mine
    ]  # fmt: skip
    one = ", ".join(sorted({_short(row["one_ms"]) for row in mine}))
    clock = "Ideal from processor time. " if any(row["clock"] == "processor" for row in mine) else ""
    furthest = max(float(row["difference"]) for row in mine)
    note = f"{clock}One process: {one} ms. The largest difference of a parameter: {furthest:.1e}."
    return f"## `{size}`, {stages} stages\n\n{grid(head, lines)}\n\n{note}\n"


def _of_torch(row: Row) -> tuple[str, str]:
    return (row["of_torch"], row["of_torch_on_gloo"]) if row["side"] == OURS else ("", "")


def _short(milliseconds: str) -> str:
    return f"{float(milliseconds):.1f}"


def _aims(steps: Sequence[Row]) -> str:
    most = ", ".join(f"{most:g} times the ideal for `{size}`" for size, most in aims.OF_IDEAL.items())
    before = " and ".join(aims.BEFORE_TORCH)
    return f"At most {most}, and less than torch's for {before}.\n\n{bullets(aims.times(steps))}\n"


def _lanes(path: Path) -> str:
    _, name, size, stages = path.stem.split("_")
    return f"## A step of {name} on `{size}`, {stages} stages\n\n![A step and its ideal](results/{path.name})\n"


def _kept(saved: Sequence[Row], size: str, stages: str) -> str:
    mine = {
        (row["way"], row["stage"], int(row["micro_batches"])): row["peak_saved_bytes"]
        for row in saved
        if (row["size"], row["stages"]) == (size, stages)
    }
    counts = sorted({m for _, _, m in mine})
    lines = [_line(mine, way, str(stage), counts) for way in WAYS for stage in range(int(stages))]
    head = ("schedule", "stage", *(f"m = {m}" for m in counts))
    return f"### `{size}`, {stages} stages: MiB\n\n{grid(head, filter(None, lines))}\n"


def _line(mine: Mapping[tuple[str, str, int], str], way: str, stage: str, counts: Sequence[int]) -> tuple[str, ...]:
    found = [mine.get((way, stage, m)) for m in counts]
    if not any(found):
        return ()
    return way, stage, *("" if nbytes is None else _mib(int(nbytes)) for nbytes in found)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.3f}"
