"""Modules that a fork server imports for a program: what fails or starts threads is reported."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from comm_entries import Pipe

from paceline.comm.fork_server import ForkServer
from paceline.core.errors import PacelineError

MODULES = {
    "raises_at_import": "raise RuntimeError('not today')",
    "exits_at_import": "raise SystemExit(3)",
    "dies_at_import": "import os; os._exit(7)",
    "threads_at_import": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "works_at_import": "VALUE = 5",
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(ForkServer.start(())) as started:
        yield started


def test_there_is_no_report_where_nothing_was_to_be_imported(server: ForkServer) -> None:
    assert server.imported() is None


def test_modules_that_fail_are_named_and_the_others_are_there(server: ForkServer, pipe: Pipe) -> None:
    server.begin_import(["raises_at_import", "exits_at_import", "no_such_module", "works_at_import"])
    report = server.imported()
    assert report is not None
    assert dict(report.failed) == {
        "raises_at_import": "RuntimeError: not today",
        "exits_at_import": "SystemExit: 3",
        "no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    }
    assert report.threads == 0
    server.spawn("comm_entries:modules", {"names": ["works_at_import", "raises_at_import"]}, [pipe.fd])
    assert pipe.read() == [True, False]


def test_threads_that_a_module_leaves_are_counted(server: ForkServer) -> None:
    server.begin_import(["threads_at_import"])
    report = server.imported()
    assert report is not None
    assert report.threads == 1


@pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="a library that ends its threads before forks")
def test_threads_of_a_library_that_knows_of_forks_are_not_counted(server: ForkServer) -> None:
    server.begin_import(["numpy", "scipy.linalg"])
    report = server.imported()
    assert report is not None
    assert (dict(report.failed), report.threads) == ({}, 0)


def test_a_module_that_ends_the_fork_server_is_reported(server: ForkServer) -> None:
    server.begin_import(["dies_at_import"])
    with pytest.raises(PacelineError, match=r"does not answer .*exit code 7"):
        server.imported()


def test_a_report_waits_for_whoever_asks_last(server: ForkServer, pipe: Pipe) -> None:
    server.begin_import(["raises_at_import"])
    server.spawn("comm_entries:echo", {"a": 1}, [pipe.fd])
    assert pipe.read() == {"a": 1}
    report = server.imported()
    assert report is not None
    assert list(report.failed) == ["raises_at_import"]
    assert server.imported() is None
