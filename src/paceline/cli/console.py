"""Conventions of all commands: results on stdout, messages on stderr, exit codes."""

import contextlib
import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

import typer

from paceline.core.errors import InputError, PacelineError
from paceline.core.formatting import printable
from paceline.core.safe_files import check_working_folder

T = TypeVar("T")

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
        check_working_folder()
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
    """Return ``path`` if it is no folder and its own folder exists, else raise InputError."""
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; write the path of a file")
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.parent}; write mkdir -p {path.parent} first")
    return path


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes ``path``, into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{option} {path} can't be written: {error.strerror}; write a file elsewhere") from error


class Stdout:
    """stdout, of which is known whether all could be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Write a text."""
        return self._tried(lambda: self._stream.write(text))

    def flush(self) -> None:
        """Write what is buffered."""
        self._tried(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _tried(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except OSError as error:
            self.failure = error
            raise


@contextlib.contextmanager
def whole_output() -> Iterator[None]:
    """Exit with code 1, after one line on stderr, if what the block prints can't be written, as to a full disk."""
    sys.stdout = stdout = Stdout(sys.stdout)
    try:
        yield
    except (OSError, SystemExit):
        with contextlib.suppress(OSError):
            stdout.flush()
        if stdout.failure is None or stdout.failure.errno == errno.EPIPE:  # a pipe's reader may have seen enough
            raise
        # Python flushes again as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        typer.secho(f"error: stdout can't be written: {stdout.failure.strerror}", fg="red", err=True)
        raise SystemExit(FAILED) from None
