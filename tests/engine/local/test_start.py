"""The start of a run on this host: who captures the model, who imports, and what is said of it."""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline import InputError, Program, Run, train
from paceline.core.errors import WaitTimeoutError
from paceline.engine.base import Engine, Job, Outcome, Progress, Watcher
from paceline.engine.local import engine as local_engine
from paceline.engine.local.engine import LocalEngine
from paceline.engine.spmd import capturing
from tests.engine import programs

Local = Callable[..., Run]

CORES = len(os.sched_getaffinity(0))


class Noting(nn.Module):
    """Writes into a file which process traces it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = str(file)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            with open(self._file, "a") as file:
                file.write(f"{os.getpid()}\n")
        return self.second(torch.tanh(self.first(x)))


def noting(file: Path) -> Program:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return Program(functools.partial(Noting, file), cross_entropy, sgd, programs.data(), batch_size=8)


STRATEGIES = ("stages=2", "shards=2", "replicas=2 stages=2 aggregation=asynchronous")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_main_captures_a_model_for_all_its_workers(local: Local, tmp_path: Path, strategy: str) -> None:
    local(noting(tmp_path / "who"), strategy, steps=2)
    assert set((tmp_path / "who").read_text().split()) == {str(os.getpid())}


@pytest.mark.parametrize("strategy", ["stages=2", "shards=2"])
def test_one_rank_captures_a_model_where_main_does_not(
    local: Local, tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = local(noting(tmp_path / "main"), strategy, steps=2)
    monkeypatch.setattr(local_engine, "captured_for_workers", lambda job: None)
    run = local(noting(tmp_path / "who"), strategy, steps=2)
    who = set((tmp_path / "who").read_text().split())
    assert len(who) == 1
    assert str(os.getpid()) not in who
    # Where the model is cut is measured; the sums are those of one order all the same.
    for name, value in expected.state.items():
        torch.testing.assert_close(run.state[name], value, rtol=1e-12, atol=1e-12)


def test_a_capture_that_takes_too_long_says_so(local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> Any:
        while True:
            pass

    monkeypatch.setattr(capturing, "LEAST_S", 0.0)
    monkeypatch.setattr(capturing, "capture_for_stages", endless)
    said = r"the model of program was not captured as a graph within 0.05 s; write timeout_s=0.5, or"
    with pytest.raises(WaitTimeoutError, match=said):
        local(noting(tmp_path / "who"), "stages=2", steps=2, timeout_s=0.05)


class Contiguous(nn.Module):
    """Of a single sample the transposed batch is contiguous, which no size says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.second(x if x.t().is_contiguous() else 2 * x)


def test_single_samples_are_refused_where_the_model_does_something_else_with_them(local: Local) -> None:
    """Found while the first stage measures where to cut, so that it is not the one that says so."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    program = Program(Contiguous, cross_entropy, sgd, programs.data(), batch_size=8)
    assert local(program, "stages=2 micro_batches=4", steps=2).summary["updates"] == 2
    with pytest.raises(InputError, match="a batch of 1 samples: the model does something else with it than with 2"):
        local(program, "stages=2 micro_batches=8", steps=2)


def test_what_a_rank_refuses_while_main_still_captures_is_said(local: Local) -> None:
    """The last stage looks at the whole batch, which nobody has before; then it is gone when the graph comes."""
    inputs, targets = programs.data(samples=16)
    targets[5] = 17
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    program = Program(programs.mlp, cross_entropy, sgd, (inputs, targets), batch_size=16)
    with pytest.raises(
        InputError, match=r"the model or its loss fails on the first batch.*: Target 17 is out of bound"
    ):
        local(program, "stages=2", steps=2)


class Watched(Engine):
    """The local engine, and what is said before training."""

    name, features = "local", LocalEngine.features

    def __init__(self, inner: LocalEngine) -> None:
        self._inner = inner
        self.works: list[str] = []

    def refuse(self, job: Job) -> None:
        self._inner.refuse(job)

    def run(self, job: Job, watch: Watcher) -> Outcome:
        def note(progress: Progress) -> None:
            if progress.phase == "starting" and progress.work not in self.works:
                self.works.append(progress.work)
            watch(progress)

        return self._inner.run(job, Watcher(note, watch.event, lambda: watch.stopped))


@pytest.mark.parametrize(
    ("strategy", "works"),
    [
        ("stages=2", ["capturing", "cutting stages"]),
        ("shards=2", ["capturing", "planning shards"]),
        ("replicas=2 shards=2 aggregation=asynchronous", ["capturing", "planning shards"]),
        ("replicas=3", [f"starting 3 workers on {CORES} core{'s' * (CORES > 1)}"]),
    ],
)
def test_progress_says_what_is_being_done(engine: LocalEngine, tmp_path: Path, strategy: str, works: list[str]) -> None:
    watched, program = Watched(engine), noting(tmp_path / "who")
    train(program, strategy, engine=engine, steps=2, progress=False)  # so that all is imported
    train(program, strategy, engine=watched, steps=2, progress=False)
    assert [work for work in watched.works if work] == works


def test_progress_says_that_a_new_fork_server_imports(tmp_path: Path) -> None:
    with LocalEngine() as inner:
        watched = Watched(inner)
        train(noting(tmp_path / "who"), "replicas=1", engine=watched, steps=2, progress=False)
        assert watched.works[0] == "importing"


THREADS = """
import threading
from torch.nn.functional import cross_entropy
threading.Thread(target=threading.Event().wait, daemon=True).start()
def loss(output, target):
    return cross_entropy(output, target)
"""

# Ends the fork server, which is a child of main's, and no worker.
DIES = """
import os
from torch.nn.functional import cross_entropy
if os.getppid() == {main}:
    os._exit(7)
def loss(output, target):
    return cross_entropy(output, target)
"""


@pytest.fixture(params=[THREADS, DIES])
def harmful(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An installed module that no fork server can import without harm."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_harmful_loss.py").write_text(request.param.format(main=os.getpid()))
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("a_harmful_loss")
    del sys.modules["a_harmful_loss"]


def test_workers_import_what_the_fork_server_cannot(harmful: Any) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    program = Program(programs.mlp, harmful.loss, sgd, programs.data(), batch_size=8)
    with LocalEngine() as engine:
        run = train(program, "replicas=2", engine=engine, steps=2, progress=False)
        assert run.history[-1].updates == 2
        assert engine._left_out == {"a_harmful_loss"}
        first = engine._fork_server
        train(program, "replicas=2", engine=engine, steps=2, progress=False)
        assert engine._fork_server is first  # it is not tried again
