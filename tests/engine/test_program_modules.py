"""Which installed modules a program needs: of its classes and functions, and what the user's own files refer to."""

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Program
from paceline.engine.program_modules import program_modules
from tests.engine import programs

MODEL = "import torch\nclass Net(torch.nn.Linear):\n    pass\n"
LOSS = "def loss(output, target):\n    return ((output - target) ** 2).mean()\n"
FILE = "import a_library\nfrom a_loss import loss\ndef make():\n    return None\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three installed modules, and a file of the user's that imports two of them."""
    packages, own = tmp_path / "site-packages", tmp_path / "own"
    packages.mkdir()
    own.mkdir()
    for name, text in {"a_model": MODEL, "a_loss": LOSS, "a_library": ""}.items():
        (packages / f"{name}.py").write_text(text)
    (own / "a_script.py").write_text(FILE)
    for folder in (packages, own):
        monkeypatch.syspath_prepend(folder)
    names = ("a_model", "a_loss", "a_library", "a_script")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


def program(model: Any, loss: Any) -> Program:
    return Program(model, loss, functools.partial(torch.optim.SGD, lr=0.1), programs.data())


def test_modules_of_the_models_classes_and_of_functions_are_found(files: Any) -> None:
    module = nn.Sequential(files["a_model"].Net(6, 3))
    assert program_modules(program(programs.mlp, files["a_loss"].loss), module) == ("a_loss", "a_model")
    assert program_modules(program(programs.mlp, functools.partial(files["a_loss"].loss)), module)[0] == "a_loss"


def test_a_file_of_the_users_is_left_out_but_not_what_it_refers_to(files: Any) -> None:
    module = nn.Linear(6, 3)
    assert program_modules(program(files["a_script"].make, torch.nn.functional.mse_loss), module) == (
        "a_library",
        "a_loss",
    )


def test_what_others_have_put_among_pythons_builtins_is_not_the_programs(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.print", files["a_loss"].loss)
    assert program_modules(program(programs.mlp, torch.nn.functional.mse_loss), nn.Linear(6, 3)) == ()


def test_what_fork_servers_have_anyway_is_left_out() -> None:
    module = nn.Linear(6, 3)
    assert program_modules(program(programs.mlp, torch.nn.functional.cross_entropy), module) == ()
