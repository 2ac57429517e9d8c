"""R10, R11, R12: checkpoints whose writer is killed, whose files are damaged, whose disk is full."""

import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from injector import trainee, undisturbed

from paceline.checkpoint.reader import newest
from paceline.core.errors import InputError
from rows.contract import Outcome, row


@row("main", trials=100)
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
                    run.process.kill()
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


@row("disk", trials=10)
def full_disk(trials: int) -> Outcome:
    """R12: a disk that is too small for a checkpoint and then has room again (tmpfs of its own; needs root)."""
    outcome = Outcome(
        "R12", "checkpoints on a disk that is full, then not", "training goes on; saved again once there is room"
    )
    for _ in range(trials):
        with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
            mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", name], check=False)
            if mounted.returncode != 0:
                return outcome
            try:
                filler = Path(name) / "filler"
                filler.write_bytes(bytes(3 << 20))
                saving = {"checkpoint": f"{name}/ckpt", "checkpoint_every": "10 steps", "keep": 1, "width": 64}
                with trainee(strategy="replicas=2", steps=150, pause_s=0.02, **saving) as run:
                    run.wait_for_step()
                    time.sleep(1.0)  # some saves fail meanwhile
                    filler.unlink()
                    result = run.result()
                found, damaged = newest(Path(name) / "ckpt")
                notes = result["notes"] if result is not None else {}
                left = [path.name for path in (Path(name) / "ckpt").iterdir() if not path.name.startswith("step-")]
                passed = found is not None and not damaged and notes.get("checkpoint_failures", 0) and not left
                outcome.trial(None if passed else f"{notes}, {damaged}, left over: {left}")
            finally:
                subprocess.run(["umount", name], check=False)
    return outcome
