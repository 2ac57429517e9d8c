"""The page: a table for each row, and what is not as it is to be; without a row it says that there is no figure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kit.machine import described
from kit.words import bullets, grid
from models import SAMPLES, SMALL_SAMPLES, TASKS
from rounds import CHECKED, TOLERANCE
from rows import ASYNCHRONOUS, FORMS, ROWS
from sides import OURS, PLAIN, READING

HEAD = f"""\
# Paceline on GPUs, beside plain PyTorch, DDP, FSDP2, DTensor and torch.distributed.pipelining

    make test-gpu
    python benchmarks/gpu/measure.py
    python benchmarks/gpu/measure.py --page

The first trains under every engine, form of replica and policy on the accelerator, and compares each with one process
on the CPU; the second measures into `results/`, a file for each row (what is there is not measured again without
`--again`), and the third writes this page. `--rows gpt2 shards` measures some rows alone, and
`--small --device cpu --out DIR` tries all of them on a CPU.

- `{PLAIN}`: the model in one process, AdamW or SGD with torch's defaults, and a loss that nobody reads;
  `{READING}` calls `loss.item()` after each step, since Paceline's step returns its loss.
- `{OURS}`: the distributed engine, as under torchrun; in `asynchronous` rows the local engine with
  {ASYNCHRONOUS} replicas, whose A is in the host's memory, and a step is one gradient of any of them.
- DDP, FSDP2, `parallelize_module` (DTensor) and `Schedule1F1B` of `torch.distributed.pipelining`, on the device's
  backend. Two ranks that share one GPU, which NCCL refuses, exchange by Gloo; torch's sides then have one rank.

All sides of a row take turns in the same processes, from the same A_0, on one batch that is on the device; a turn ends
as the device has done its work. A side's time is the median of its turns, a ratio the median of the turns' ratios to
plain PyTorch. Before that each side makes {CHECKED} steps alone. Its peak is the most that torch has allocated on the
device meanwhile, on the rank that has most; `apart` is how far its parameters end from plain PyTorch's, as a part of
the way from A_0, and the script fails above {TOLERANCE:g}. Predicted is what the planner says of such a worker, without
what the runtime takes.
"""

NONE = """\
**No GPU has been at hand: nothing has been measured, and no figure stands here.**
"""

TRIED = "This is a trial with small models: its figures say nothing."


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole text, of what has been measured so far."""
    if not rows:
        return f"{HEAD}\n{NONE}"
    devices = "; ".join(sorted({f"{row['devices']} × {row['device']}" for row in rows}))
    where = f"Device: {devices}. Host: {described([row['machine'] for row in rows])}."
    tables = [f"## {_title(row)}\n\n{_table(row)}\n" for row in rows]
    aims = f"## What is to be reached\n\n{bullets(_aims(rows))}\n"
    tried = [f"{TRIED}\n"] if any(row["small"] for row in rows) else []
    return "\n".join([HEAD, f"{where}\n", *tried, *tables, aims])


def shown(row: Mapping[str, Any]) -> str:
    """A row as it comes."""
    lines = [f"{side:32} {f['step_ms']:10.3f} ms {f['ratio']:7.3f}" for side, f in row["sides"].items()]
    return "\n".join([row["row"], *lines])


def _title(row: Mapping[str, Any]) -> str:
    about = ROWS[row["row"]]
    samples = SMALL_SAMPLES if row["small"] else SAMPLES[about.task]
    precision = "bf16 autocast" if TASKS[about.task].precision == "bf16" else "float32"
    strategy = f", `{FORMS[about.form]}`" if about.form else ""
    return f"{row['row']}: {samples} samples a step, {precision}{strategy}"


def _table(row: Mapping[str, Any]) -> str:
    head = ("side", "step, ms", "÷ plain", "samples/s", "peak, MiB", "predicted, MiB", "apart", "rounds")
    return grid(head, [_line(side, figures) for side, figures in row["sides"].items()])


def _line(side: str, figures: Mapping[str, Any]) -> Sequence[str]:
    def text(name: str, form: str) -> str:
        value = figures.get(name)
        return "" if value is None else format(value, form)

    times = text("step_ms", ".3f"), text("ratio", ".3f"), text("samples_per_s", ",.0f")
    memory = text("peak_mib", ",.0f"), text("predicted_mib", ",.0f")
    return (side, *times, *memory, text("apart", ".1e"), text("rounds", "d"))


def _aims(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        most, ratio = ROWS[row["row"]].most, row["sides"][OURS]["ratio"]
        if most is None:
            continue
        missed = "" if ratio <= most else " (missed)"
        if ROWS[row["row"]].form == "asynchronous":
            yield f"{row['row']}: {1 / ratio:.3f} times the gradients of one process, at least {1 / most:.3g}{missed}"
        else:
            yield f"{row['row']}: {ratio:.3f} of plain PyTorch's step, at most {most:.3g}{missed}"
