"""The benchmark of the collectives: its checks, and its whole way from a measurement to the page."""

import contextlib
import csv
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "collectives"

COMMAND = (sys.executable, str(FOLDER / "measure.py"))

TIMEOUT_S = 300

QUICKEST = ("--ranks", "2", "--sizes", "1K", "--pairs", "1", "--turn", "0.001")

ENDLESS = ("--ranks", "2", "--calls", "barrier", "all_reduce", "--sizes", "4K", "--pairs", "1000000")
"""The barrier has a row already; all these turns of the other call take longer than the test."""

MACHINE = {
    "processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01",
}  # fmt: skip


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "results" / "collectives.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def row(call: str, ranks: int, nbytes: int, ratio: float, pairs: int = 9) -> dict[str, str]:
    """One that was never measured."""
    cell = {"call": call, "ranks": str(ranks), "bytes": str(nbytes)}
    times = {"shm_us": "10.0", "gloo_us": str(10 * ratio), "ratio": str(ratio), "pairs": str(pairs)}
    return cell | times | {"shm_calls": "1", "gloo_calls": "1", "turn_ms": "40"} | MACHINE


def test_every_call_is_measured_once_and_told_on_the_page(load: Callable[[str], Any], tmp_path: Path) -> None:
    done = run(tmp_path, *QUICKEST)
    assert done.returncode == 0, done.stderr
    first = rows(tmp_path)
    assert [row["call"] for row in first] == list(load("calls").CALLS)
    assert {(row["ranks"], row["pairs"]) for row in first} == {("2", "1")}
    assert all(float(row["shm_us"]) > 0 and float(row["gloo_us"]) > 0 for row in first)
    assert load("measure").main([*QUICKEST, "--out", str(tmp_path)]) == 0
    assert rows(tmp_path) == first  # nothing was measured again
    assert load("measure").main(["--page", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{row['call']}` | **{float(row['ratio']):.2f}**" in text for row in first[:-1])
    assert first[0]["processor"] in text


@pytest.fixture
def endless(load: Callable[[str], Any], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A measurement that has one row and will not end by itself; nothing of it is left afterwards."""
    load("measure").Sheet(tmp_path / "results" / "collectives.csv", ["call"]).put(row("barrier", 2, 0, 3.0, 1000000))
    words = [*COMMAND, "--out", str(tmp_path), *ENDLESS]
    # A shell that starts the tests in its background has them ignore Ctrl-C, and so what they start.
    words = ["env", "--default-signal=INT", *words]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Both ranks, once they are there: children of the server that forks them."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        children = psutil.Process(process.pid).children()
        found = [rank for child in children for rank in child.children()]
        if len(found) == 2:
            return found
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"it ended with exit code {process.wait(0.05)}")
    raise TimeoutError(f"{process.args} had no two ranks within {TIMEOUT_S:g} s")


def test_a_rank_that_dies_is_named_and_rows_are_kept(endless: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = ranks_of(endless)
    ranks[1].kill()
    _, errors = endless.communicate(timeout=TIMEOUT_S)
    assert endless.returncode == 1
    assert "of 2 was killed by SIGKILL" in errors
    assert [row["call"] for row in rows(tmp_path)] == ["barrier"]
    assert not psutil.wait_procs(ranks, TIMEOUT_S)[1]


def test_ctrl_c_ends_cleanly_and_rows_are_kept(endless: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = ranks_of(endless)
    endless.send_signal(signal.SIGINT)
    _, errors = endless.communicate(timeout=TIMEOUT_S)
    assert endless.returncode == 130
    assert "the same command goes on from there" in errors
    assert "Traceback" not in errors
    assert [row["call"] for row in rows(tmp_path)] == ["barrier"]
    assert not psutil.wait_procs(ranks, TIMEOUT_S)[1]


def test_a_call_that_does_nothing_is_seen(load: Callable[[str], Any]) -> None:
    calls = load("calls")
    for name, make in calls.CALLS.items():
        cases = [replace(make(600, rank, 2), call=lambda group: None) for rank in (0, 1)]
        assert name == calls.BARRIER or not all(case.check(None) for case in cases), name


def test_sums_stay_exact_with_eight_ranks(load: Callable[[str], Any]) -> None:
    calls = load("calls")
    assert int(calls.total(calls.PERIOD, 8).max()) < 2**24  # up to which float32 holds every whole number


def test_the_page_lists_what_is_slower_and_what_misses_its_aim(load: Callable[[str], Any]) -> None:
    aimed = [("all_reduce", 2, 2**18, 4.9), ("all_reduce", 8, 2**10, 1.9), ("send and back", 2, 2**10, 2.9)]
    met = [("all_reduce", 2, 2**12, 5.0), ("all_reduce", 2, 2**24, 1.5), ("gather", 4, 2**10, 1.0)]
    text = load("page").page([row(*one) for one in (*aimed, *met, ("scatter", 4, 2**10, 0.9))])
    slower, below = text.split("## Slower than Gloo: 1 of 7 rows")[1].split("## Below the aims: 3 more")
    assert slower.strip() == "- scatter, 4 ranks, 1 KiB: 0.90 (aim 1)"
    assert [line for line in below.splitlines() if line.startswith("- ")] == [
        "- all_reduce, 2 ranks, 256 KiB: 4.90 (aim 5)",
        "- all_reduce, 8 ranks, 1 KiB: 1.90 (aim 2)",
        "- send and back, 2 ranks, 1 KiB: 2.90 (aim 3)",
    ]


def test_a_page_of_nothing_says_what_to_do(
    load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("measure").main(["--page", "--out", str(tmp_path)]) == 2
    assert "leave out --page first" in capsys.readouterr().err
