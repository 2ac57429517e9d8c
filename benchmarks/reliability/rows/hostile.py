"""R16: hostile checkpoints, runs and weights, read in all ways that Paceline has, in a process that is measured."""

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hostile_corpus import KINDS, Case, cases, make_case, make_sound
from torch.distributed.checkpoint.api import CheckpointException

from rows.contract import DDP, Observed, Outcome, compared, row

READER = Path(__file__).parents[1] / "hostile_reader.py"

# Longest refusal that passes, and what it may take beside twice the file.
REFUSAL_S, SPARE_MB = 1.0, 64.0
# A reader that says nothing for so long hangs.
HANG_S = 30.0


@dataclass
class Reader:
    """The process that reads; started again after it has crashed or hung."""

    _process: "subprocess.Popen[str] | None" = field(default=None, init=False)

    def read(self, kind: str, path: Path) -> list[dict[str, Any]]:
        """Return what came of each way to read a path, or that the process crashed or hung."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(READER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, bufsize=1, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"kind": kind, "path": str(path)}) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], HANG_S)
        line = process.stdout.readline() if ready else ""
        if line:
            answers: list[dict[str, Any]] = json.loads(line)
            return answers
        state = "hung" if not ready else f"crashed ({process.wait()})"
        self.close()
        return [{"way": "any", "outcome": state, "text": "", "seconds": HANG_S, "memory_mb": 0.0}]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def size_mb(path: Path) -> float:
    """Return what a path takes on the disk: a sparse file takes what is stored of it."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_blocks * 512 for each in files) / 2**20


def judge(name: str, case: Case, path: Path, answer: dict[str, Any]) -> str | None:
    """Return what is wrong with an answer, or None."""
    where = f"{name} by {answer['way']}"
    if (path.parent / "canary").exists():
        return f"{where}: ran code"
    named = str(path) in answer["text"]
    begun_anew = answer["way"] == "train(resume=True)" and answer["outcome"] == "read" and named
    harmless = case.harmless or (case.weights and answer["way"] not in ("resume", "train(resume=True)"))
    if answer["outcome"] == "read" and (harmless or begun_anew):
        return None
    if answer["outcome"] != "refused":
        return f"{where}: {answer['outcome']} {answer['text'][-300:]}"
    if answer["outcome"] == "refused" and not named:
        return f"{where}: refused, but does not name the file: {answer['text'][:200]}"
    if answer["seconds"] > REFUSAL_S:
        return f"{where}: took {answer['seconds']:.1f} s"
    if answer["memory_mb"] > 2 * size_mb(path) + SPARE_MB:
        return f"{where}: took {answer['memory_mb']:.0f} MB for {size_mb(path):.1f} MB"
    return None


@row("hostile", trials=124)
def read_hostile_files(trials: int) -> Outcome:
    """R16: so many cases of the corpus, each in all ways to read its kind."""
    outcome = Outcome(
        "R16",
        "hostile checkpoints, runs and weights, read in all ways",
        "no code run, no crash; refused ≤ 1 s of processor time with the file named; memory ≤ 2 × file + 64 MB",
    )
    reader, seconds, memory = Reader(), list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name, contextlib.closing(reader):
        sound = Path(name) / "sound"
        sound.mkdir()
        make_sound(sound)
        for kind in KINDS:  # what is imported or allocated at the first use is no file's fault
            copy = make_case(Case(kind, lambda _, __: None), sound, Path(name) / f"warm-{kind}")
            reader.read(kind, copy)
        for title, case in itertools.islice(cases(), trials):
            with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as other:
                path = make_case(case, sound, Path(other))
                answers = reader.read(case.kind, path)
                wrong = [found for answer in answers if (found := judge(title, case, path, answer))]
                outcome.trial("; ".join(wrong[:2]) or None)
                seconds += [answer["seconds"] for answer in answers if answer["outcome"] == "refused"]
                memory += [answer["memory_mb"] for answer in answers]
    outcome.figures |= {"reads": len(memory), "longest_s": max(seconds), "most_memory_mb": max(memory)}
    return outcome


@compared("hostile", DDP, trials=1)
def torch_reads_hostile_files(trials: int) -> Observed:
    """What torch.load and torch.distributed.checkpoint do with the same pickles."""
    ran = 0
    for title in ("inputs: torch.save of an object", "dcp: pickle as .metadata"):
        case = dict(cases())[title]
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            sound = Path(name) / "sound"
            sound.mkdir()
            make_sound(sound)
            path = make_case(case, sound, Path(name))
            with contextlib.suppress(Exception, CheckpointException):
                if case.kind == "dcp":
                    dcp.load({"model": {}}, checkpoint_id=path, no_dist=True)
                else:
                    torch.load(path, weights_only=True)
            ran += (Path(name) / "canary").exists()
    return Observed(trials, "torch.load refuses; DCP's reader runs the code in .metadata", {"ran_code": ran})
