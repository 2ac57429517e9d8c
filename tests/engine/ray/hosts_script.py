"""A run on a Ray of three hosts, network namespaces of one machine, of which one is lost; prints what became of it.

Started as root, in a namespace of processes that ends with it (test_ray_hosts.py); starts itself on the first host.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "hosts")]

from cluster import ADDRESS, cluster, in_host  # noqa: E402
from kit.hosts import hosts  # noqa: E402
from torch.optim import SGD  # noqa: E402

from paceline import Run, Strategy, WorkerError, launch, train  # noqa: E402
from paceline.engine.ray.engine import RayEngine  # noqa: E402
from tests import oracle  # noqa: E402
from tests.engine import programs  # noqa: E402
from tests.engine.local.test_replica_group import ROUNDING  # noqa: E402

PATIENCE_S = 350.0
STEPS = 9

PROGRAM = programs.program(optimizer=functools.partial(SGD, lr=0.1, momentum=0.9))


def lose(name: str) -> None:
    """Take a host's link, and kill all of its processes."""
    subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True, timeout=20)
    own = os.stat(f"/run/netns/{name}").st_ino
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "ns" / "net").stat().st_ino == own:
                os.kill(int(process.name), signal.SIGKILL)


def loop(worker: Any, *, folder: Path) -> None:
    """Each replica waits at its fifth step until a host is lost, so that none is done before."""
    for made, batch in enumerate(worker.batches()):
        if made == 4:
            (folder / f"there-{worker.replica}").touch()
            while not (folder / "lost").exists():
                time.sleep(0.05)  # the mark is all that it is told
        worker.step(batch)


def drive(folder: Path, strategy: str, options: dict[str, Any]) -> None:
    """Train on the cluster, from its first host; ``whole`` among the options: before, and as it says."""
    whole = options.pop("whole", None)
    settings: dict[str, Any] = {
        "progress": False,
        "evaluate_every": 10**6,
        "steps": STEPS,
        "timeout_s": 120.0,
        **options,
    }
    with RayEngine(ADDRESS) as engine:
        same = None
        if whole is not None:
            same = is_one_process(train(PROGRAM, whole, engine=engine, **settings))
        try:
            run = launch(functools.partial(loop, folder=folder), PROGRAM, strategy, engine=engine, **settings)
        except WorkerError as error:
            print(json.dumps({"failed": str(error).splitlines()[0]}))
        else:
            left = [[departure.replica, departure.reason] for departure in run.left]
            print(json.dumps({"updates": run.summary["updates"], "left": left, "same": same}))


def is_one_process(run: Run) -> bool:
    """Whether a run has the parameters of one process that makes the updates of all replicas."""
    try:
        oracle.assert_same(run.model, oracle.one_process(PROGRAM, run.strategy.replicas, STEPS), ROUNDING)
    except AssertionError:
        return False
    return True


def main(folder: str, strategy: str, options: str, lost: str) -> int:
    """Run it, and lose a host."""
    replicas = Strategy.parse(strategy).replicas
    with hosts(3) as names, cluster(names, [1, 1, 1]) as environment:
        words = [sys.executable, __file__, "drive", folder, strategy, options]
        process = subprocess.Popen(in_host(names[0], *words), env=environment, cwd=ROOT)
        deadline = time.monotonic() + PATIENCE_S
        while (
            len([*Path(folder).glob("there-*")]) < replicas and process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.05)  # the mark is all that it is told
        lose(names[int(lost)])
        Path(folder, "lost").touch()
        return process.wait(PATIENCE_S)


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        drive(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    else:
        sys.exit(main(*sys.argv[1:]))
