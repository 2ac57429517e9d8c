"""Users' own loops and data, from whatever they are written in."""

import functools
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline import Run, launch
from paceline.engine.local.engine import LocalEngine
from tests import oracle
from tests.engine import programs

Local = Callable[..., Run]

STEPS = 13
ROUNDING = 1e-12
"""Sums in another order, over 13 steps."""


def test_the_loop_of_the_design(engine: LocalEngine) -> None:
    """A closure that is a lambda; without a budget, one pass."""
    program, made = programs.program(), [0]
    run = launch(
        lambda worker: made.extend(worker.step(batch) for batch in worker.batches()),
        program,
        "replicas=2",
        engine=engine,
        progress=False,
    )
    oracle.assert_same(run.model, oracle.one_process(program, 2, 7), ROUNDING)  # 50 = 6 · 8 + 2
    assert made == [0]  # it has run elsewhere


def test_a_loop_of_its_own_pace(local: Local) -> None:
    def loop(worker: Any) -> None:
        batches = worker.batches()
        while worker.going:
            assert worker.going  # asked twice, it is the same step
            batch = next(batches)
            assert worker.step(batch) > 0 or not batch.samples

    program = programs.program()
    run = local(program, "replicas=3", steps=STEPS, loop=loop)
    oracle.assert_same(run.model, oracle.one_process(program, 3, STEPS), ROUNDING)


def test_batches_of_its_own(local: Local) -> None:
    """Those of the order, made by the loop itself; it goes on until it is told that training has ended."""
    inputs, targets = programs.data()
    data = oracle.order(programs.program(), 2)

    def loop(worker: Any) -> None:
        k = 0
        while True:
            chosen = torch.as_tensor(data.batch(worker.replica, k))
            worker.step((inputs[chosen], targets[chosen]))
            k += 1

    program = programs.program()
    run = local(program, "replicas=2", steps=STEPS, loop=loop)
    oracle.assert_same(run.model, oracle.one_process(program, 2, STEPS), ROUNDING)


def breaks_off(worker: Any) -> None:
    for made, batch in enumerate(worker.batches()):
        if worker.replica == 1 and made == 3:
            break
        worker.step(batch)


@pytest.mark.parametrize("policy", ["synchronous", "asynchronous", "buffered:k=2,cancel=true", "hogwild"])
def test_a_loop_may_break_off(local: Local, policy: str) -> None:
    """Its replica is done; nobody has died."""
    run = local(programs.program(), f"replicas=3 aggregation={policy}", steps=STEPS, loop=breaks_off)
    assert run.left == []
    assert run.summary["steps"] == STEPS
    assert not run.summary["interrupted"]
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]


def test_the_others_go_on_from_that_round_on(local: Local) -> None:
    program = programs.program()
    plain, data = oracle.Plain(program), oracle.order(program, 3)
    for k in range(STEPS):
        present = [0, 1, 2] if k < 3 else [0, 2]
        plain.step(plain.gradient([i for r in present for i in data.batch(r, k).tolist()]))
    run = local(program, "replicas=3", steps=STEPS, loop=breaks_off)
    oracle.assert_same(run.model, plain.values(), ROUNDING)


@pytest.mark.parametrize("budget", [{"steps": 5}, {"seconds": 1000}])
def test_all_may_break_off(local: Local, budget: dict[str, float]) -> None:
    run = local(programs.program(), "replicas=3", loop=lambda worker: None, **budget)
    assert run.summary["gradients"] == 0
    assert run.left == []
    assert len(run.history) == 1 or "seconds" in budget


def test_a_worker_knows_who_it_is(local: Local, tmp_path: Path) -> None:
    def loop(worker: Any) -> None:
        (tmp_path / f"{worker.replica} of {worker.replicas}").touch()
        for batch in worker.batches():
            worker.step(batch)

    local(programs.program(), "replicas=3", steps=1, loop=loop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 of 3", "1 of 3", "2 of 3"]


# ------------------------------------------------------------------------------------------------ where it is written

SCRIPT = """
import functools, json, torch
from paceline import Program, launch

class Model(torch.nn.Linear):
    pass

bound = 3
inputs, targets = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
program = Program(model=lambda: Model(4, 3), loss=torch.nn.functional.cross_entropy, batch_size=4,
                  optimizer=functools.partial(torch.optim.SGD, lr=0.1), train=(inputs, targets))

def loop(worker):
    for k, batch in enumerate(worker.batches()):
        if k == bound:
            break
        worker.step(batch)

run = launch(loop, program, "replicas=2", steps=5, progress=False)
print(json.dumps([type(run.model).__name__, run.summary["updates"], run.left]))
"""


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_without_a_guard(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    words = {"file": [str(tmp_path / "script.py")], "-c": ["-c", SCRIPT], "stdin": ["-"]}[how]
    given = SCRIPT if how == "stdin" else None
    done = subprocess.run(
        [sys.executable, *words], input=given, capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["Model", 3, []]


FAILS = (
    SCRIPT.partition("def loop")[0]
    + """
def loop(worker):
    for batch in worker.batches():
        worker.model.weight.absent
        worker.optimizer.step()

def asks(worker):
    worker.optimizer.state_dict()

if __name__ == "__main__":
    import sys
    launch(globals()[sys.argv[1]], program, "replicas=2", steps=5, progress=False)
"""
)


@pytest.mark.parametrize(
    ("loop", "line", "error"),
    [
        ("loop", "worker.model.weight.absent", "AttributeError: 'Parameter' object has no attribute 'absent'"),
        ("asks", "worker.optimizer.state_dict()", "InputError: optimizer.state_dict(): "),
    ],
)
def test_the_line_of_a_loop_that_fails_is_named(tmp_path: Path, loop: str, line: str, error: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS, encoding="utf-8")
    words = [sys.executable, str(script), loop]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    number = next(n for n, each in enumerate(FAILS.splitlines(), start=1) if each.strip() == line)
    before, own, _ = done.stderr.partition(f'  File "{script}", line {number}, in {loop}\n    {line}\n')
    assert own, done.stderr
    assert error in done.stderr
    # Before it neither the frames of the worker that called the loop, nor those of main that took its message.
    frames = before.partition("Traceback (most recent call last)")[2]
    assert frames
    assert "/paceline/engine/" not in frames.replace("/paceline/api/train.py", "")


def test_a_script_may_train_as_often_as_it_likes(tmp_path: Path) -> None:
    """Engines that are not closed end with it."""
    again = textwrap.dedent(
        """
        from paceline import train
        from paceline.engine.local.engine import LocalEngine
        engine = LocalEngine()
        for policy in ("asynchronous", "local-steps:period=2", "hogwild"):
            train(program, f"replicas=2 aggregation={policy}", engine=engine, steps=4, progress=False)
        """
    )
    done = subprocess.run([sys.executable, "-c", SCRIPT + again], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------------------------- data


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set."""

    def __init__(self) -> None:
        self.inputs, self.targets = programs.data()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def stacked(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


LOADERS: dict[str, dict[str, Any]] = {
    "data set": {"train": Pairs()},
    "collate": {"train": Pairs(), "loader": {"collate_fn": stacked}},
    "fetched ahead": {"train": Pairs(), "loader": {"num_workers": 2}},
    "tensors fetched ahead": {"loader": {"num_workers": 1, "collate_fn": stacked}},
}


@pytest.mark.parametrize("name", LOADERS)
def test_data_of_any_kind(local: Local, name: str) -> None:
    program = programs.program(**LOADERS[name])
    run = local(program, "replicas=2", steps=STEPS)
    oracle.assert_same(run.model, oracle.one_process(programs.program(), 2, STEPS), ROUNDING)


def source(replica: int, replicas: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A pass of 4 batches."""
    inputs, targets = programs.data()
    for k in range(4):
        first = (k * replicas + replica) * 4
        yield inputs[first : first + 4], targets[first : first + 4]


def test_data_that_a_function_makes(local: Local) -> None:
    """It is called again where it runs dry."""
    program = programs.program()
    plain = oracle.Plain(program)
    for k in range(9):
        plain.step(plain.gradient(range(k % 4 * 8, k % 4 * 8 + 8)))
    run = local(programs.program(train=source), "replicas=2", steps=9)
    oracle.assert_same(run.model, plain.values(), ROUNDING)
    assert run.history[-1].train_loss is not None  # of the Δs, for there is no set to sample


def test_data_lie_once_in_memory(local: Local, tmp_path: Path) -> None:
    """24 MB, which all map and nobody copies."""
    inputs = torch.ones(50, 60_000, dtype=torch.float64)
    program = programs.program(
        model=functools.partial(torch.nn.Linear, 60_000, 3, dtype=torch.float64), train=(inputs, programs.data()[1])
    )

    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)
        mapped = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines()]
        seen = {name: sum(int(words[1]) for words in parcel(mapped) if words[0] == name) for name in ("Size:", COPIED)}
        (tmp_path / str(worker.replica)).write_text(json.dumps([seen["Size:"] > 23_000, seen[COPIED]]))

    local(program, "replicas=3", epochs=1, loop=loop)
    assert [json.loads((tmp_path / str(replica)).read_text()) for replica in range(3)] == [[True, 0]] * 3


COPIED = "Anonymous:"
"""Of a mapping, what this process has a copy of its own of, in kB."""


def parcel(lines: list[list[str]]) -> Iterator[list[str]]:
    """Of the lines of smaps, those about the job's parcel."""
    inside = False
    for words in lines:
        if not words[0].endswith(":"):
            inside = any("paceline:shared-object" in word for word in words)
        elif inside:
            yield words
