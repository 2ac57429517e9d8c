"""What all commands share: what goes to stdout, what to stderr, and with which exit code a command ends."""

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

REFUSED = 2
"""Exit code where nothing was started, because what was asked for can't be done as written."""
FAILED = 1
INTERRUPTED = 130


@contextlib.contextmanager
def session(*, json_output: bool) -> Iterator[None]:
    """Errors of Paceline become one message on stderr and an exit code; ``--json`` keeps stdout clean meanwhile.

    ``PACELINE_TRACEBACK=1`` prints where the error was raised as well.
    """
    try:
        with _stdout_to_stderr() if json_output else contextlib.nullcontext():
            yield
    except PacelineError as error:
        if os.environ.get("PACELINE_TRACEBACK") == "1":
            traceback.print_exc()
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(REFUSED if isinstance(error, InputError) else FAILED) from None
    except KeyboardInterrupt:
        typer.secho("interrupted before there was a result", fg="red", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """File descriptor 1 is stderr for as long as this lasts, so nothing that workers print joins the JSON either."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout, on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def end(*, interrupted: bool) -> None:
    """Leave with exit code 130 where a run was cut short."""
    if interrupted:
        typer.secho("interrupted: the results are those up to then", fg="yellow", err=True)
        raise typer.Exit(INTERRUPTED)


def write_target(option: str, path: Path) -> Path:
    """``path``, if a file can be written there; raises InputError where its folder does not exist."""
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.parent}; write mkdir -p {path.parent} first")
    return path
