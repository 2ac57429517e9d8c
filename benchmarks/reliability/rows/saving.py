"""R10, R11: checkpoints whose writing process is killed, and whose files are damaged."""

import contextlib
import hashlib
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from injector import inject, living, trainee, undisturbed, until

from paceline.checkpoint.reader import Checkpoint, newest
from paceline.core.errors import InputError
from rows.contract import Outcome, row


@row("main", trials=250)
def kill_main(trials: int) -> Outcome:
    """R10: SIGKILL the main process at a random time of saving, again and again, until the run is through."""
    outcome = Outcome(
        "R10",
        "SIGKILL the main process while it trains and saves every step, resume",
        "always a sound checkpoint, end with all bits as without a kill",
    )
    given: dict[str, Any] = {"strategy": "replicas=2", "steps": 60, "pause_s": 0.02}
    whole, draw, lost = undisturbed(**given), random.Random(11), list[float]()
    while outcome.trials < trials:
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            folder, result, reached = Path(name) / "ckpt", None, -1
            saving = {"checkpoint": str(folder), "checkpoint_every": "1 steps", "resume": True}
            while result is None:
                with trainee(**given, **saving) as run:
                    if run.wait_for_step() is None or outcome.trials >= trials:
                        result = run.result()
                        break
                    time.sleep(draw.uniform(0.0, 0.6))
                    if run.process.poll() is not None:
                        result = run.result()
                        break
                    before = max((int(p.name[5:]) for p in folder.glob("step-*")), default=-1)
                    inject(signal.SIGKILL, run.process.pid)
                    run.process.wait()
                found, damaged = newest(folder)
                version = -1 if found is None else int(found.folder.name[5:])
                sound = version >= max(before, reached) and not damaged
                outcome.trial(None if sound else f"newest is {version} after {before}, damaged: {damaged}")
                lost.append(version)
                reached = max(reached, version)
            if result is None or result["digest"] != whole["digest"]:
                outcome.trial("the run ended with other bits, or not well")
    outcome.figures["kills"] = len(lost)
    return outcome


@row("overwrite", trials=250)
def kill_while_overwriting(trials: int) -> Outcome:
    """R10: SIGKILL a run that goes on from an early checkpoint and writes others over damaged ones of their names."""
    outcome = Outcome(
        "R10",
        "SIGKILL the main process while it saves over damaged checkpoints of the same names",
        "sound ones stay, and all sound ones have the bits of an undisturbed run's",
    )
    given: dict[str, Any] = {"strategy": "replicas=2", "steps": 20, "keep": 100}
    draw = random.Random(12)
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        folder = Path(name) / "ckpt"
        saving = {"checkpoint": str(folder), "checkpoint_every": "1 steps", "resume": True}
        undisturbed(**given, pause_s=0.1, **saving)
        whole = {path.name: contents(path) for path in _by_version(folder)}
        for _ in range(trials):
            kept = _by_version(folder)[:2]
            for path in _by_version(folder)[2:]:
                flipped_bit(path / "part-0.safetensors", path, draw)
            with trainee(**given, pause_s=0.02, **saving) as run:
                if run.wait_for_step() is not None:
                    time.sleep(draw.uniform(0.0, 0.4))
                with contextlib.suppress(ProcessLookupError):
                    inject(signal.SIGKILL, run.process.pid)
                run.process.wait()
                left = not until(lambda run=run: not living(str(run.folder)), 10.0)
            sound = {path.name: contents(path) for path in _by_version(folder) if _is_sound(path)}
            other = [name for name, value in sound.items() if value != whole.get(name, value)]
            lost = [path.name for path in kept if path.name not in sound]
            failure = f"other bits: {other}, lost: {lost}, processes left: {left}"
            outcome.trial(failure if other or lost or left else None)
            whole = sound | whole
    return outcome


def _by_version(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), key=lambda path: int(path.name[5:]))


def _is_sound(folder: Path) -> bool:
    try:
        Checkpoint.open(folder).verify()
    except InputError:
        return False
    return True


def contents(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's tensors."""
    checkpoint, total = Checkpoint.open(folder), hashlib.sha256()
    for tensor in sorted(checkpoint.names()):
        total.update(tensor.encode() + checkpoint.read(tensor).contiguous().numpy().tobytes())
    return total.hexdigest()


@row("mutate", trials=1000)
def mutate(trials: int) -> Outcome:
    """R11: flip a bit, zero a page, truncate, swap, or remove a file of the newest checkpoint."""
    outcome = Outcome(
        "R11", "mutations of the newest checkpoint's files", "none loads; the file is named; the one before is taken"
    )
    draw = random.Random(13)
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        folder = Path(name) / "ckpt"
        saving = {"checkpoint": str(folder), "checkpoint_every": "20 steps", "keep": 3}
        undisturbed(strategy="replicas=1", steps=60, width=32, **saving)
        sound, older = sorted(folder.iterdir(), key=lambda path: -int(path.name[5:]))[:2]
        files = sorted(path for path in sound.iterdir() if path.is_file())
        kept = {path: path.read_bytes() for path in files}
        for _ in range(trials):
            path = draw.choice(files)
            how = draw.choice(MUTATIONS)
            how(path, older / path.name, draw)
            if path.exists() and path.read_bytes() == kept[path]:
                continue  # the file of the older one was the same
            try:
                found, damaged = newest(folder)
                passed = found is not None and found.folder == older and path.name in damaged[0]
                outcome.trial(None if passed else f"{how.__name__} of {path.name}: {damaged}")
            except (InputError, OSError) as error:
                outcome.trial(f"{how.__name__} of {path.name}: {error}")
            finally:
                path.write_bytes(kept[path])
    return outcome


def flipped_bit(path: Path, _: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def zeroed_page(path: Path, _: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content)) // 4096 * 4096
    end = min(len(content), at + 4096)
    content[at:end] = bytes(end - at)
    path.write_bytes(content)


def truncated(path: Path, _: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def of_an_older_one(path: Path, older: Path, _: random.Random) -> None:
    shutil.copyfile(older, path)


def missing(path: Path, _: Path, __: random.Random) -> None:
    path.unlink()


MUTATIONS: list[Callable[[Path, Path, random.Random], None]] = [
    flipped_bit,
    flipped_bit,
    flipped_bit,
    zeroed_page,
    truncated,
    of_an_older_one,
    missing,
]
