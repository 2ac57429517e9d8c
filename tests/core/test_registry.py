"""Engines are found by their folders, and one from elsewhere joins them; for other families see test_policy_text."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline import register
from paceline.api.train import open_engine
from paceline.core.errors import InputError
from paceline.engine import ENGINES
from paceline.engine.base import Engine, Job, Outcome, Watcher


def test_engines_are_listed_without_importing_one_or_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import paceline; from paceline.engine import ENGINES; "
        "print(*ENGINES.names()); print(sorted(m for m in sys.modules if m.startswith('paceline.engine')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["distributed local ray virtual", "['paceline.engine']"], done.stderr


def test_every_folder_with_an_engine_registers_its_own_name() -> None:
    folders = Path(paceline.__file__).parent.glob("engine/*/engine.py")
    assert sorted(file.parent.name for file in folders) == sorted(ENGINES.modules)
    for name in ENGINES.modules:
        assert ENGINES.entry(name).cls.name == name


class Echo(Engine):
    name = "echo"

    def __init__(self, address: str | None = None) -> None:
        self.address = address

    @classmethod
    def from_address(cls, address: str | None) -> "Echo":
        return cls(address)

    def refuse(self, job: Job) -> None:
        raise NotImplementedError

    def run(self, job: Job, watch: Watcher) -> Outcome:
        raise NotImplementedError


@pytest.fixture
def echo() -> Iterator[None]:
    register("echo")(Echo)
    yield
    del ENGINES.entries["echo"]


@pytest.mark.usefixtures("echo")
def test_an_engine_of_ones_own_is_opened_by_its_name() -> None:
    opened = [open_engine(name) for name in ("echo", "echo:", "echo:a:b")]
    assert [engine.address for engine in opened if isinstance(engine, Echo)] == [None, "", "a:b"]
    with pytest.raises(InputError, match="did you mean 'echo'"):
        open_engine("ecko")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ray:", "engine='ray:' names no cluster; write engine='ray:auto' or engine='ray:HOST:PORT'"),
        ("distributed:", "engine='distributed:' names no backend; write engine='distributed:gloo'"),
        ("local:gloo", "unknown engine 'local:gloo'; did you mean 'local'"),
        ("vitual:", "unknown engine 'vitual:'; did you mean 'virtual'"),
    ],
)
def test_an_address_that_an_engine_does_not_take(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_engine(name)
