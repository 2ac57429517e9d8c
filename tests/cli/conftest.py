"""Stand-ins for what the commands call, so that a test sees exactly what a command asked for."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.core.records import ReplicaExit

Invoke = Callable[..., Result]

SUMMARY: dict[str, Any] = {
    "updates": 1200,
    "gradients": 3600,
    "discarded": 12,
    "cancelled": 40,
    "test_accuracy": 0.9712,
    "staleness_mean": 2.5,
    "samples_per_s": 4321.0,
    "test_loss": None,
    "interrupted": False,
    "notes": {},
}


@dataclass
class FakeRun:
    """What a command uses of a Run."""

    strategy: str = "replicas=4"
    summary: dict[str, Any] = field(default_factory=lambda: deepcopy(SUMMARY))
    left: list[ReplicaExit] = field(default_factory=list[ReplicaExit])

    def to_json(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "engine": "local", "summary": self.summary, "history": [], "left": []}


class FakeSharding:
    """What a command uses of a Sharding."""

    def __str__(self) -> str:
        return "the table of shards"

    def to_json(self) -> dict[str, Any]:
        return {"shards": 2, "rows": [{"module": "0", "cut": "column"}]}


@dataclass
class FakeComparison:
    """What a command uses of a Comparison."""

    interrupted: bool = False
    signal: str | None = None

    def table(self, baseline: str | None = None) -> str:
        return f"the table against {baseline}"

    def to_json(self) -> dict[str, Any]:
        rounds = [{"summary": SUMMARY, "history": [], "left": []}]
        return {"strategies": [{"strategy": "replicas=2", "rounds": rounds, "mean": {}}], "baseline": "replicas=2"}


@dataclass
class FakeShare:
    """What a command uses of SharedRuns."""

    interrupted: bool = False
    signal: str | None = None

    def table(self) -> str:
        return "the table of jobs"

    def to_json(self) -> dict[str, Any]:
        return {"jobs": {"digits": {"summary": SUMMARY}}, "slices": [], "ended": "all jobs have left"}


@dataclass
class Calls:
    """Every call of a stand-in by name; ``results`` holds what it returns or, an exception, raises."""

    made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list[tuple[str, tuple[Any, ...], dict[str, Any]]]
    )
    results: dict[str, Any] = field(default_factory=dict[str, Any])

    def stand_in(self, name: str, result: Any) -> Callable[..., Any]:
        self.results[name] = result

        def call(*args: Any, **keywords: Any) -> Any:
            self.made.append((name, args, keywords))
            if isinstance(self.results[name], BaseException):
                raise self.results[name]
            return self.results[name]

        return call

    def of(self, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords of the only call of ``name``."""
        [(args, keywords)] = [(args, keywords) for called, args, keywords in self.made if called == name]
        return args, keywords


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """``load_program`` and what the commands call, each replaced."""
    recorded = Calls()
    for module, name, result in (
        ("paceline.datasets", "load_program", "the program"),
        ("paceline.api.train", "train", FakeRun()),
        ("paceline.api.show", "show_stages", "the table"),
        ("paceline.api.show", "sharding_of", FakeSharding()),
        ("paceline.api.compare", "compare", FakeComparison()),
        ("paceline.api.share_workers", "share_workers", FakeShare()),
        ("paceline.report", "write_report", None),
    ):
        # By module, not by dotted text: ``paceline.train`` as an attribute is the function.
        monkeypatch.setattr(import_module(module), name, recorded.stand_in(name, result))
    return recorded


@pytest.fixture
def invoke() -> Invoke:
    """Run the command line with these words."""

    def run(*words: str | Path) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words])

    return run


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide, uncoloured output, and no tracebacks."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("PACELINE_TRACEBACK", raising=False)
