"""Files and folders that appear whole or not at all, and JSON in them; no torch.

What is written is flushed to the disk before it gets its name, so that a crash of the machine leaves the old or the
new, too. A process that is killed in between leaves a partial file or folder; whoever writes the same path next
removes it. It is known to be left over by its lock (``flock``), which the kernel releases with the process.
"""

import csv
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO

from paceline.core.errors import InputError
from paceline.core.formatting import printable
from paceline.core.types import Seconds

# Size of a file that is read at once.
LARGEST_BYTES = 1 << 28
# Memory that the values of any JSON may take.
_SMALL_BYTES = 48 << 20
# A header of safetensors that others have written; half a million tensors. And the texts in it that are no tensors.
_LARGEST_HEADER_BYTES = 16 << 20
_LARGEST_METADATA_BYTES = 1 << 20
# A file of so many bytes, of which the disk has not even a part in so many, was never written as one.
_SPARSE_BYTES, _SPARSE_RATIO = 1 << 30, 1024
# How long a process that was killed may hold a lock.
LOCK_WAIT_S: Seconds = 2.0
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's are
_HALF_SURROGATE = re.compile(rb"\\u[dD][89abAB]")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text file that replaces ``path`` when the block ends, and is removed if the block fails."""
    target = Path(path)
    partial = _new_partial(target)
    try:
        with naming(partial), partial.open("x", encoding="utf-8", newline="\n") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
        sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def remove_leftover(partial: Path) -> None:
    """Remove a partial file or folder if the process that wrote it has ended, so that nobody has it locked."""
    # Another process may remove it at the same time.
    with suppress(OSError), locked(partial, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink()


@contextmanager
def locked(path: Path, operation: int = fcntl.LOCK_SH) -> Iterator[None]:
    """Hold a lock on a file or folder for the block; it goes with the process, however that ends.

    Raises:
        OSError: there is no such path; BlockingIOError: another process has locked it, and ``LOCK_NB`` was asked for.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, operation)
        yield
    finally:
        os.close(handle)


def lock_alone(path: Path, timeout_s: Seconds) -> int | None:
    """Lock a file or folder for this process alone, and return the file descriptor that holds the lock.

    Args:
        path: of the file or folder.
        timeout_s: how long another process may hold it; one that was killed takes a moment to end.

    Returns:
        None: its file system has no locks.

    Raises:
        BlockingIOError: another process holds it.
        OSError: there is no such path.
    """
    handle, deadline = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                raise
            time.sleep(0.02)
        except OSError:
            os.close(handle)
            return None
        else:
            return handle


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError of the block that names none, as those of write and fsync."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def check_out(path: str | Path) -> Path:
    """Return the absolute path of a folder that is to be written later; raise InputError if that can't work."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InputError(f"{path!r} names no folder; write the path of a new one, 'runs/a' for instance")
    target = Path(path).absolute()
    if os.path.lexists(target):
        raise InputError(
            f"{path} exists, and nothing is overwritten; write another folder, {_other(path)} for instance"
        )
    check_writable(target)
    return target


def _other(path: str | Path) -> str:
    """Return the path of another folder, for messages."""
    return f"{path}-2" if Path(path).name not in ("", "..") else os.path.join(path, "a")


@contextmanager
def reserved(path: str | Path) -> Iterator[Path]:
    """Keep the path of a folder that is to be written later for this process alone, as long as the block lasts.

    What is held is a name of sockets, which the system gives up with the process: of one that is killed nothing is
    left. Processes of other hosts have other names.

    Yields:
        The absolute path.

    Raises:
        InputError: it exists or can't be made, or another run has reserved it.
    """
    target = check_out(path)
    above = next(parent for parent in target.parents if parent.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".paceline-", suffix=".partial", dir=above))
    except OSError as error:
        raise InputError(f"{path} can't be made: {error}; write a path below a folder of yours") from error
    # Of the device, too: two containers may have one network, and other files at the same path.
    place = f"{above.stat().st_dev}:{os.path.realpath(target)}"
    with socket.socket(socket.AF_UNIX) as holder:
        if not _bind(holder, f"\0paceline-{hashlib.sha256(os.fsencode(place)).hexdigest()}"):
            raise InputError(
                f"another run that has not ended is to be saved in {path}; end that one first, or write another "
                f"folder, {_other(path)} for instance"
            )
        check_out(path)  # the run that had it may have ended well
        yield target


def _bind(holder: socket.socket, name: str) -> bool:
    """Give a socket its name; return False where another process has it, also a moment later."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            holder.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # there are no such names here, so nothing is reserved
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def check_working_folder() -> None:
    """Raise InputError if this process's working folder has been removed, which breaks far more than relative paths."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the working folder has been removed; write cd and a folder that exists") from None


def check_writable(path: str | Path) -> None:
    """Raise InputError unless files can be written into a folder, which is made where it is missing."""
    target = Path(path).absolute()
    ancestor = next(parent for parent in (target, *target.parents) if os.path.lexists(parent))
    if not ancestor.is_dir():
        raise InputError(f"{path} can't be made: {ancestor} is no folder; write a path below a folder")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise InputError(f"{path} can't be made: {ancestor} is not writable; write a path below a folder of yours")


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Make a folder to write into, which is renamed to ``path`` when the block ends, and removed if the block fails.

    Raises:
        InputError: ``path`` exists or can't be made, or something in it can't be written (the disk is full, say).
    """
    target = check_out(path)
    partial = _new_partial(target)
    try:
        partial.mkdir(parents=True)
        with locked(partial):
            yield partial
            for each in (*partial.rglob("*"), partial):
                sync(each)
            check_out(path)  # once more, since a rename would replace an empty folder that has appeared meanwhile
            partial.rename(target)
        sync(target.parent)
    except OSError as error:
        raise InputError(f"{path} can't be written: {error}; write a folder where there is room for it") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _new_partial(target: Path) -> Path:
    """Return a path to write before it is renamed to the target, and remove those that others have left over there."""
    for partial in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        remove_leftover(partial)
    # Next to the target, not in a temporary folder: only within one file system is a rename atomic.
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.partial")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error of the block, which reads ``path``, into an InputError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path} is missing; write the path of a folder that is whole") from None
    except RecursionError:
        raise InputError(f"{path} can't be read: its values are nested too deep") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, csv.Error) as error:
        # The text of a KeyError is the key alone.
        reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path} can't be read: {printable(reason)}") from error


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it; raise ValueError for FIFOs, devices and terabytes of holes."""
    # O_NONBLOCK: the open of a FIFO that nobody writes would wait.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    stored = found.st_blocks * _BLOCK_BYTES
    reason = None
    if not stat.S_ISREG(found.st_mode):
        reason = "it is no regular file"
    elif found.st_size > _SPARSE_BYTES and stored * _SPARSE_RATIO < found.st_size:
        reason = f"of its {found.st_size:,} bytes only {stored:,} are stored"
    if reason is not None:
        os.close(handle)
        raise ValueError(reason)
    return os.fdopen(handle, "rb")


def check_safetensors(path: Path, most: int = _LARGEST_HEADER_BYTES) -> None:
    """Require a regular file whose header can be given to the safetensors library, which checks the rest.

    Its own bound is 100 MB, for which it takes a minute and a gigabyte; of a key that stands twice it takes the last.

    Args:
        path: of the file.
        most: bytes that the header may have.

    Raises:
        ValueError: the header is larger, or not within the file, or no JSON object of different keys.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        header = int.from_bytes(file.read(8), "little")
        if header > size - 8:
            raise ValueError(f"its header should have {header:,} bytes, but the file has {size:,}")
        if header > most:
            raise ValueError(f"its header has {header:,} bytes, and {most:,} are the most that it may have")
        text = file.read(header)
    bound_values(text, size)
    metadata = parse_json(text).get("__metadata__")
    if len(str(metadata)) > _LARGEST_METADATA_BYTES:
        raise ValueError(f"its __metadata__ has more than {_LARGEST_METADATA_BYTES:,} bytes")


def read_bytes(path: Path, *, most: int = LARGEST_BYTES) -> bytes:
    """Return the contents of a regular file; raise ValueError for another, or one of more than ``most`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size:,} bytes, and {most:,} are the most that it may have")
        return file.read(most)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, keys in their order; readers see the old file or the new one, never a part."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as file:
        file.write(text + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise InputError, naming the file, if there is none."""
    with reading(path):
        text = read_bytes(path)
        bound_values(text, len(text))
        return parse_json(text)


def bound_values(text: bytes, stored_bytes: int) -> None:
    """Require that JSON will not take much more memory than ``stored_bytes``; raise ValueError otherwise.

    Three characters, as of "[],", become an object of 80 bytes.
    """
    estimate = 100 * (text.count(b"[") + text.count(b"{")) + 40 * text.count(b",")
    if estimate > 4 * stored_bytes + _SMALL_BYTES:
        raise ValueError(f"its {len(text):,} bytes would take {estimate:,} bytes of memory")


def parse_json(text: bytes) -> dict[str, Any]:
    """Return a JSON object whose keys are all different; raise ValueError or RecursionError for anything else."""
    value = json.loads(text.decode(), object_pairs_hook=_unique)
    if _HALF_SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # a half one is no text: that is a ValueError
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return found
