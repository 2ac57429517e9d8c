"""R12: checkpoints on a disk that is full, has no more inodes, is read-only, or under a limit for files; then not."""

import contextlib
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from injector import Trainee, inject, living, trainee, until

from paceline.checkpoint.reader import newest
from rows.contract import Outcome, row

STEPS, EVERY = 150, 10

Fault = Callable[[Path, Trainee], Callable[[], None]]
"""Breaks the disk of a run that trains, and returns what mends it."""


@row("disk", trials=25)
def full_disk(trials: int) -> Outcome:
    """R12: a disk without room for a checkpoint (tmpfs of its own; needs root)."""
    return _break(Outcome("R12", "checkpoints on a full disk, then with room again", PASSES), trials, _filled)


@row("inodes", trials=25)
def no_inodes(trials: int) -> Outcome:
    """R12: a disk without inodes."""
    return _break(Outcome("R12", "checkpoints on a disk without inodes, then with", PASSES), trials, _inodes_used)


@row("read-only", trials=25)
def read_only(trials: int) -> Outcome:
    """R12: a disk that is mounted read-only while a run trains."""
    return _break(Outcome("R12", "checkpoints on a disk that becomes read-only", PASSES), trials, _mounted_read_only)


@row("file-size", trials=25)
def file_size(trials: int) -> Outcome:
    """R12: RLIMIT_FSIZE below the size of a checkpoint, set from outside."""
    return _break(Outcome("R12", "checkpoints larger than RLIMIT_FSIZE, then not", PASSES), trials, _limited)


PASSES = "training goes on; said before the next save is due; the one before intact; nothing left over; saved again"


def _break(outcome: Outcome, trials: int, fault: Fault) -> Outcome:
    for _ in range(trials):
        with tmpfs() as disk:
            saving = {"checkpoint": f"{disk}/ckpt", "checkpoint_every": f"{EVERY} steps", "keep": 1}
            with trainee(strategy="replicas=2", steps=STEPS, pause_s=0.02, width=64, **saving) as run:
                failure = _trial(disk / "ckpt", run, lambda run=run, disk=disk: fault(disk, run))
                said = run.stderr()
        named = "the checkpoint at update" in said and "training goes on" in said
        outcome.trial(failure, named=named, said=said)
    return outcome


def _trial(folder: Path, run: Trainee, fault: Callable[[], Callable[[], None]]) -> str | None:
    """Break the disk after the first checkpoint, mend it after the second failure, and look at the end."""
    if not until(lambda: any(folder.glob("step-*"))):
        return "no checkpoint before the fault"
    mend = fault()
    try:
        inject("disk broken of", run.process.pid)
        if not until(lambda: run.stderr().count("failed") > 0 or run.process.poll() is not None, 30.0):
            return "nothing was said of the failure"
        said_after = max((each.step for each in run.all_begun()), default=0)
        failed_at = int(run.stderr().split("the checkpoint at update ")[1].split()[0])
        found, damaged = newest(folder)
        if found is None or damaged:
            return f"the checkpoint before is not intact: {damaged}"
    finally:
        mend()
    inject("disk mended of", run.process.pid)
    result = run.result()
    if result is None:
        return "training did not go on"
    found, damaged = newest(folder)
    left = [path.name for path in folder.iterdir() if not path.name.startswith("step-")]
    if found is None or damaged or found.folder.name != f"step-{result['updates']}" or left:
        return f"at the end: newest {found and found.folder.name}, damaged {damaged}, left over {left}"
    return None if said_after <= failed_at + EVERY else f"failed at {failed_at}, said after step {said_after}"


def why_not() -> str | None:
    """Return what keeps this process from mounting a disk of its own; None: nothing."""
    try:
        with tmpfs():
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        return f"a tmpfs can't be mounted here: {error}"


@contextlib.contextmanager
def tmpfs() -> Iterator[Path]:
    """Context manager: a disk of 32 MB and 60 files; unmounted at the end."""
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,nr_inodes=60", "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=False)


def _filled(disk: Path, run: Trainee) -> Callable[[], None]:
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(1 << 14))
    return filler.unlink


def _inodes_used(disk: Path, run: Trainee) -> Callable[[], None]:
    made: list[Path] = []
    with contextlib.suppress(OSError):
        for i in range(100):
            (disk / f"file-{i}").touch()
            made.append(disk / f"file-{i}")

    def mend() -> None:
        for path in made:
            path.unlink()

    return mend


def _mounted_read_only(disk: Path, run: Trainee) -> Callable[[], None]:
    def remount(how: str) -> bool:  # busy while a file is written
        return subprocess.run(["mount", "-o", f"remount,{how}", disk], check=False, capture_output=True).returncode == 0

    if not until(lambda: remount("ro"), 10.0):
        raise RuntimeError(f"{disk} can't be mounted read-only")
    return lambda: remount("rw") or None  # type: ignore[func-returns-value]


def _limited(disk: Path, run: Trainee) -> Callable[[], None]:
    def limit(size: int) -> None:
        for pid in living(str(run.folder)):
            with contextlib.suppress(OSError):
                if b"writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    limit(1 << 15)
    return lambda: limit(resource.RLIM_INFINITY)
