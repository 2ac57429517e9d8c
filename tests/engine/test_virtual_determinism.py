"""The same job gives the same bytes, in another process, under another hash seed, on a busy machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]

CASES = {
    "mlp": "replicas=9 aggregation=asynchronous",
    "dropout": "replicas=5 aggregation=smooth-switch:every=50",
    "batchnorm": "replicas=4 aggregation=buffered:k=2,cancel=true",
    "convolution": "replicas=3 aggregation=local-steps:period=2,over=asynchronous",
}

SCRIPT = """
import functools, json, sys
import torch
from paceline import train
from tests.engine import programs
from tests.engine.test_virtual_determinism import CASES

torch.manual_seed(int(sys.argv[1]))
for model, strategy in CASES.items():
    program = programs.program(
        model=getattr(programs, model), train=programs.data(samples=48), test=programs.data(samples=20),
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
    )
    run = train(program, strategy, engine="virtual", seconds=0.5, delay="fraction=0.5 normal:mean=0,std=0.05",
                times="compute=exponential:mean=0.01 apply=0.001", trace=True, progress=False)
    print(json.dumps(run.to_json()), run.spans, {n: v.tolist() for n, v in run.state.items()})
"""


def output(seed: int) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(seed)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@contextmanager
def load() -> Iterator[None]:
    """As many processes as cores that never rest."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_two_processes_agree_to_the_byte() -> None:
    quiet = output(1)
    with load():
        busy = output(2)
    assert len(quiet) == len(CASES)
    for name, one, other in zip(CASES, quiet, busy, strict=True):
        assert one == other, name
        assert ("up to 32 attempts" in one) == (name == "mlp")
