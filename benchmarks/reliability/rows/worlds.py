"""R14: saved by so many, gone on with by others; the whole matrix is in ``tests/``, which this runs."""

import subprocess
import sys
from pathlib import Path

from rows.contract import Outcome, row

ROOT = Path(__file__).resolve().parents[3]
TRIALS = 25
TESTS = ("tests/engine/test_distributed_checkpoints.py", "tests/checkpoint", "tests/test_resume.py")


@row("worlds", trials=TRIALS)
def other_worlds(trials: int) -> Outcome:
    """R14: each test of the matrix is a trial; those of the long run as well where all trials are asked for."""
    outcome = Outcome(
        "R14",
        "saved at N ranks, gone on at M: tests of the matrix",
        "all parameters and state bit-equal, no sample twice",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=1000", "-rpfE", *TESTS]
    chosen = [] if trials >= TRIALS else ["-m", "not thorough"]
    done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True, check=False, timeout=3600)
    for line in done.stdout.splitlines():
        verdict, _, name = line.partition(" ")
        if verdict in ("PASSED", "FAILED", "ERROR") and name.startswith(
            "tests/"
        ):  # not a line of what a test has logged
            outcome.trial(None if verdict == "PASSED" else name)
    if not outcome.trials:
        outcome.trial(done.stdout[-300:])
    return outcome
