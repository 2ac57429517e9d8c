"""Reads what a line of JSON on stdin names, in all ways that Paceline has, and prints what came of it as one line.

A process of its own, so that a crash, a hang, or memory that is used and given back does not go unseen.
"""

import contextlib
import io
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile_corpus import small_program
from typer.testing import CliRunner

import paceline
from paceline.api.predictor import read_inputs
from paceline.checkpoint.interop import read_state
from paceline.checkpoint.interop_dcp import export_dcp, import_dcp
from paceline.checkpoint.interop_safetensors import export_safetensors, import_safetensors
from paceline.cli.main import app
from paceline.core.errors import InputError

PROGRAM = small_program()
QUIET: dict[str, Any] = {"engine": "virtual", "progress": False}


def listed(path: Path) -> Any:
    """``paceline checkpoints DIR``: exit code 1 and the file named, no control characters."""
    result = CliRunner().invoke(app, ["checkpoints", str(path)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if not result.output.replace("\n", "").replace("\t", "").isprintable():
        raise RuntimeError(f"control characters on the terminal: {result.output[:200]!r}")
    if result.exit_code:
        raise InputError(result.output)
    return result.output


def resumed(path: Path) -> Any:
    return paceline.resume(path, PROGRAM, steps=5, **QUIET)


def trained(path: Path) -> Any:
    return paceline.train(PROGRAM, "replicas=2", steps=5, checkpoint=path, resume=True, **QUIET)


def ways(kind: str, path: Path, out: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield all ways to read a kind of folder or file."""
    if kind == "checkpoint":
        yield "checkpoints DIR", lambda: listed(path)
        yield "resume", lambda: resumed(path)
        yield "export safetensors", lambda: export_safetensors(path, out / "hf")
        yield "export dcp", lambda: export_dcp(path, out / "dcp")
        yield "read_state", lambda: read_state(path)
        yield "train(resume=True)", lambda: trained(path)
    elif kind == "run":
        yield "load", lambda: paceline.load(path, PROGRAM)
    elif kind == "safetensors":
        yield "import", lambda: import_safetensors(path, out / "from-hf")
    elif kind == "dcp":
        yield "import", lambda: import_dcp(path, out / "from-dcp")
    else:
        yield "read_inputs", lambda: read_inputs(path)


def peak_mb() -> float:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    # What is imported or allocated at the first use is none of a file's.
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            request = json.loads(line)
            path, answers = Path(request["path"]), list[dict[str, Any]]()
            with tempfile.TemporaryDirectory() as name:
                for way, read in ways(request["kind"], path, Path(name)):
                    Path("/proc/self/clear_refs").write_text("5")
                    before, began, stderr = peak_mb(), time.process_time(), io.StringIO()
                    outcome, text = "read", ""
                    try:
                        with contextlib.redirect_stderr(stderr):
                            read()
                    except InputError as error:
                        outcome, text = "refused", str(error)
                    except BaseException as error:
                        outcome, text = "raised", "".join(traceback.format_exception(error))[-1500:]
                    text += stderr.getvalue()
                    seconds = time.process_time() - began
                    answer = {"way": way, "outcome": outcome, "text": text[:3000], "seconds": seconds}
                    answer["memory_mb"] = peak_mb() - before
                    answers.append(answer)
            print(json.dumps(answers), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
