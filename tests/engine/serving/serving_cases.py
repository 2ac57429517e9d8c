"""Servers and processes that join them, in threads of the test's own process, or in processes of their own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from paceline import Program, Run
from tests.engine.local.commands import eventually
from tests.engine.own_loops import MAKERS, SGD, make_model

SCRIPT = Path(__file__).with_name("joining_script.py")


def start(make: str = "sgd") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer that each script builds, with the same values."""
    model = Program(model=make_model, optimizer=SGD).build()
    return model, MAKERS[make](model.parameters())


def rows(out: Path) -> dict[int, int]:
    """Return the pids of the replicas that workers.json names."""
    found = json.loads((out / "workers.json").read_text())
    return {row["replica"]: row["pid"] for row in found if row["role"] == "replica"}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's values."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def gradient_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Put the gradients of a batch into the parameters."""
    model.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


class Served:
    """A server in a thread.

    Args:
        folder: for its run.
        strategy: of the run.
        settings: of :func:`paceline.serve`.
    """

    def __init__(self, folder: Path, strategy: str, settings: Mapping[str, Any], make: str = "sgd") -> None:
        self.out = folder / "run"
        what = dict(zip(("model", "optimizer"), start(make), strict=True))
        if "program" in settings:
            what = {}
        self._result = Future[Run]()
        arguments = {**what, "strategy": strategy, "out": self.out, "progress": False, **settings}
        self._thread = threading.Thread(target=self._serve, args=(arguments,), daemon=True)
        self._thread.start()
        eventually(lambda: (self.out / "server.json").exists() or self._result.done())

    def _serve(self, arguments: Mapping[str, Any]) -> None:
        try:
            self._result.set_result(paceline.serve(**arguments))
        except BaseException as error:
            self._result.set_exception(error)

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._result.done()

    def run(self) -> Run:
        """Return the run once it has ended, or raise what has ended it."""
        result = self._result.result(60.0)
        self._thread.join(60.0)
        return result

    @contextmanager
    def joined(self, make: str = "sgd", **given: Any) -> Iterator[tuple[Any, nn.Module, torch.optim.Optimizer]]:
        """Context manager: a script that has joined, with its model and its optimizer."""
        model, optimizer = start(make)
        with paceline.join(model=model, optimizer=optimizer, address=self.out, **given) as worker:
            yield worker, model, optimizer


def beside(*scripts: Callable[[], Any]) -> list[Any]:
    """Run scripts at the same time, each in a thread; return what they return, or raise what one raises."""
    with ThreadPoolExecutor(len(scripts)) as pool:
        return [each.result(100.0) for each in [pool.submit(script) for script in scripts]]


class Script:
    """The script in a process of its own."""

    def __init__(self, folder: Path, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def ended(self) -> tuple[int, str, str]:
        """Return its exit status, what it has printed and its messages."""
        out, err = self.process.communicate(timeout=60.0)
        return self.process.returncode, out, err
