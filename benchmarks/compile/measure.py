"""What compile=true costs and saves on one core: its first and second compilation, and a step beside a plain one."""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

from paceline import Program
from paceline.datasets.models import cnn
from paceline.datasets.shakespeare import LENGTH, next_character_loss, transformer
from paceline.replica.autograd import Autograd
from paceline.replica.base import Batch
from paceline.replica.compilation import CompiledLoss
from paceline.replica.flat_state import FlatLayout, read
from paceline.replica.single import Single

SAMPLES, STEPS, PAIRS = 32, 10, 15


def image_program() -> Program:
    """The CNN of ``mnist`` and ``cifar10``, for images of 3 × 32 × 32."""
    images, classes = torch.randn(SAMPLES, 3, 32, 32), torch.randint(10, (SAMPLES,))
    return _program(functools.partial(cnn, 3, 32), nn.functional.cross_entropy, (images, classes))


def text_program() -> Program:
    """The transformer of ``shakespeare``, for 65 characters."""
    text = torch.randint(65, (SAMPLES, LENGTH + 1))
    return _program(functools.partial(transformer, 65), next_character_loss, (text[:, :-1], text[:, 1:]))


def _program(
    model: Callable[[], nn.Module], loss: Callable[..., torch.Tensor], train: tuple[torch.Tensor, torch.Tensor]
) -> Program:
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    return Program(model, loss, optimizer, train, batch_size=SAMPLES, seed=0)


PROGRAMS = {"CNN": image_program, "transformer": text_program}


def measure(program: Program) -> dict[str, float]:
    """Compile a program's replica and return the seconds that took, and those of a step of either kind."""
    torch.set_num_threads(1)
    module = program.build()
    layout = FlatLayout.of(module)
    autograd, state = Autograd(program, module, layout, 0, "cpu"), read(module, layout.new())
    replica, out = Single(autograd), layout.new()
    inputs, targets = program.train
    batch = Batch(inputs, targets, SAMPLES)
    began = time.perf_counter()
    compiled = autograd.checked(CompiledLoss, batch, [SAMPLES])
    compile_s = time.perf_counter() - began

    def step_s(function: CompiledLoss | None) -> float:
        autograd.compiled = function
        began = time.perf_counter()
        for clock in range(STEPS):
            replica.adopt(state)
            replica.advance(batch, clock)
            replica.finish(out)
        return (time.perf_counter() - began) / STEPS

    step_s(compiled), step_s(None)
    pairs = [(step_s(compiled), step_s(None)) for _ in range(PAIRS)]
    return {
        "compile_s": compile_s,
        "compiled_ms": statistics.median(c for c, _ in pairs) * 1e3,
        "plain_ms": statistics.median(p for _, p in pairs) * 1e3,
        "ratio": statistics.median(c / p for c, p in pairs),
        "least": min(c / p for c, p in pairs),
        "most": max(c / p for c, p in pairs),
    }


def in_a_process(name: str, cache: str) -> dict[str, float]:
    """Return the measurements of a process that keeps what it compiles in this folder."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, __file__, name], env=environment, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure every program, in two processes one after the other."""
    print("| model | first compilation | second | plain step | compiled step | compiled / plain (least to most) |")
    print("|---|---|---|---|---|---|")
    for name in PROGRAMS:
        with tempfile.TemporaryDirectory() as cache:
            first, second = (in_a_process(name, cache) for _ in range(2))
        print(
            f"| {name} | {first['compile_s']:.1f} s | {second['compile_s']:.1f} s | {second['plain_ms']:.1f} ms | "
            f"{second['compiled_ms']:.1f} ms | {second['ratio']:.2f} ({second['least']:.2f} to {second['most']:.2f}) |",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(PROGRAMS[sys.argv[1]]())))
    else:
        main()
