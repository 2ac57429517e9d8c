"""Conventions of all commands: results on stdout, messages on stderr, exit codes."""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from paceline.core.errors import InputError, PacelineError
from paceline.core.formatting import printable

# Exit codes. REFUSED: nothing was started, because the request can't be done as written; the others are 128 +
# the signal that ended the run.
REFUSED = 2
FAILED = 1
INTERRUPTED = 130
TERMINATED = 143


@contextlib.contextmanager
def session(*, json_output: bool) -> Iterator[None]:
    """Turn errors of Paceline into one message on stderr and an exit code; with ``json_output`` keep stdout clean.

    ``PACELINE_TRACEBACK=1`` also prints where the error was raised.
    """
    try:
        if json_output:
            # File descriptor 1 is stderr for the block, so that output of worker processes does not join the JSON.
            sys.stdout.flush()
            stdout = os.dup(1)
            os.dup2(2, 1)
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    yield
            finally:
                os.dup2(stdout, 1)
                os.close(stdout)
        else:
            yield
    except PacelineError as error:
        if os.environ.get("PACELINE_TRACEBACK") == "1":
            traceback.print_exc()
        typer.secho(f"error: {printable(str(error))}", fg="red", err=True)
        raise typer.Exit(REFUSED if isinstance(error, InputError) else FAILED) from None
    except KeyboardInterrupt:
        typer.secho("interrupted before there was a result", fg="red", err=True)
        raise typer.Exit(INTERRUPTED) from None


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout, on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def end(*, interrupted: bool, signal: str | None = None, preempted: bool = False) -> None:
    """Exit with code 130 if a run was interrupted, with 143 if by SIGTERM, unless it was preempted: saved, to go on."""
    if interrupted:
        typer.secho("interrupted: the results are those up to then", fg="yellow", err=True)
        if not preempted:
            raise typer.Exit(TERMINATED if signal == "SIGTERM" else INTERRUPTED)


def write_target(option: str, path: Path) -> Path:
    """Return ``path`` if its folder exists, else raise InputError."""
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.parent}; write mkdir -p {path.parent} first")
    return path
