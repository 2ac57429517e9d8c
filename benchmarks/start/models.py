"""How long it takes from the command to the first step of models that are divided, beside what the model needs.

Each figure is that of a whole process. The floor of a model is a process that imports torch and transformers, builds
the model and exports it once, with the number of samples left open.

    python benchmarks/start/models.py                             # this tree
    python benchmarks/start/models.py --beside ../other/tree      # and another one, in turn
"""

import argparse
import functools
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

SAMPLES, BATCH = 16, 4

ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    """One row of the table; no strategy: the floor."""

    model: str
    strategy: str


ROWS = (
    Row("gpt2", ""),
    Row("gpt2", "stages=2"),
    Row("gpt2", "shards=2"),
    Row("swin", ""),
    Row("swin", "stages=2"),
    Row("swin", "shards=2"),
    Row("mlp", "replicas=2"),
)


def gpt2() -> Any:
    """12 layers of width 256."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 12, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 1000}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))


def swin() -> Any:
    """Swin-T: 2, 2, 6 and 2 layers on images of 224 × 224."""
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(SwinConfig(num_labels=10))


def mlp() -> Any:
    """A perceptron of one hidden layer."""
    from torch import nn

    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "swin": swin, "mlp": mlp}


def inputs(model: str, samples: int) -> Any:
    """Return random inputs of a model."""
    import torch

    if model == "gpt2":
        return {"input_ids": torch.randint(1000, (samples, 64))}
    return {"pixel_values": torch.randn(samples, 3, 224, 224)} if model == "swin" else torch.randn(samples, 20)


def loss(model: str, output: Any, target: Any) -> Any:
    """Return the cross entropy of a model's output."""
    from torch.nn.functional import cross_entropy

    scores = output if model == "mlp" else output.logits
    return cross_entropy(scores.flatten(0, -2), target.flatten())


def floor(model: str) -> None:
    """Import, build and export."""
    import torch
    from torch.export import Dim, export

    example = inputs(model, BATCH)
    shapes = {name: {0: Dim.AUTO} for name in example}
    export(MODELS[model]().train(), (), example, dynamic_shapes=shapes, strict=False)
    assert torch.is_grad_enabled()


def first_step(model: str, strategy: str) -> None:
    """Train for one step; print the time at which it was made."""
    import torch
    import transformers  # noqa: F401 (a script has it at its top)

    import paceline
    from paceline.engine.base import Job, Outcome, Progress, Watcher
    from paceline.engine.local.engine import LocalEngine

    class Watched(LocalEngine):  # the display takes nothing that could be asked instead
        def run(self, job: Job, watch: Watcher) -> Outcome:
            def note(progress: Progress) -> None:
                if progress.updates or progress.phase == "scoring":
                    print(time.monotonic(), flush=True)
                    os._exit(0)
                watch(progress)

            # Before there were callbacks a watcher was a function.
            return super().run(job, Watcher(note) if isinstance(Watcher, type) else note)

    example = inputs(model, SAMPLES)
    target = example["input_ids"] if model == "gpt2" else torch.randint(10, (SAMPLES,))
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    program = paceline.Program(
        MODELS[model], functools.partial(loss, model), optimizer, (example, target), batch_size=BATCH
    )
    with Watched() as engine:
        paceline.train(program, strategy, engine=engine, steps=4, progress=False)


def seconds_of(row: Row, tree: Path) -> float:
    """Return the seconds of a whole process until its end, or its first step."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    began = time.monotonic()
    command = [sys.executable, __file__, "--child", *row]
    printed = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout.split()
    return (float(printed[-1]) if printed else time.monotonic()) - began


def measured(rows: Sequence[Row], trees: Sequence[Path], repeats: int) -> dict[tuple[Row, int], list[float]]:
    """Return (row, tree) -> the seconds of each turn; in a turn each row is run once in each tree, the floor in one."""
    seconds = defaultdict[tuple[Row, int], list[float]](list)
    for _ in range(repeats):
        for row in rows:
            for number, tree in enumerate(trees if row.strategy else trees[:1]):
                seconds[row, number].append(seconds_of(row, tree))
    return seconds


def text(seconds: Sequence[float], digits: int = 1) -> str:
    """Return the median, and the range in parentheses."""
    return f"{median(seconds):.{digits}f} ({min(seconds):.{digits}f} to {max(seconds):.{digits}f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--beside", type=Path, help="another tree")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    given = parser.parse_args()
    if given.child:
        return first_step(*given.child) if given.child[1] else floor(given.child[0])
    trees = [ROOT, *([] if given.beside is None else [given.beside])]
    print(f"seconds, and multiples of the floor in the same turn, median (min to max) of {given.repeats} turns\n")
    print("| model | strategy | tree | seconds | of the floor |\n|---|---|---|---|---|")
    for model in given.models:
        rows = [row for row in ROWS if row.model == model]
        seconds = measured(rows, trees, given.repeats)
        floors = seconds.get((rows[0], 0), []) if not rows[0].strategy else []
        for (row, number), each in seconds.items():
            ratios = [one / least for one, least in zip(each, floors, strict=False)]
            name = "this" if number == 0 else "other"
            over = text(ratios, 2) if ratios and row.strategy else ""
            print(f"| {model} | {row.strategy or 'floor'} | {name} | {text(each)} | {over} |", flush=True)
    return None


if __name__ == "__main__":
    main()
