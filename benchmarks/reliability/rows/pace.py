"""R6: a worker whose processor is taken away for the greater part (cgroup version 1; needs root)."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from injector import Begun, inject, trainee, undisturbed, until

from rows.contract import Outcome, row

GROUPS = Path("/sys/fs/cgroup/cpu")
BOUND, PERIOD_US = 4, 10_000
GIVEN: dict[str, Any] = {"pause_s": 0.0, "width": 1024, "on_death": "replace", "arrivals": True}


@contextlib.contextmanager
def slow_group(share: float) -> Iterator[Path]:
    """Context manager: a cgroup of so large a share of one core."""
    group = GROUPS / f"paceline-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(max(1000, int(share * PERIOD_US))))
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().split(), 20.0)
        group.rmdir()


@row("straggler", trials=10)
def slow_worker(trials: int) -> Outcome:
    """R6: 1 of 4 workers is slowed about five times, under asynchronous and stale-synchronous."""
    outcome = Outcome(
        "R6",
        "1 of 4 workers has a tenth of a core; asynchronous, and stale-synchronous with a bound of 4",
        "named within 20 of its steps; staleness ≤ the bound; goodput ≥ 70 % under asynchronous; nobody is killed",
    )
    free = GIVEN | {"strategy": "replicas=4 aggregation=asynchronous", "steps": None, "seconds": 8.0}
    bounded = GIVEN | {"strategy": f"replicas=4 aggregation=stale-synchronous:bound={BOUND}", "steps": 100}
    whole, goodputs, named_after, slower = undisturbed(**free), list[float](), list[int](), list[float]()
    for _ in range(trials):
        result, after, times, _ = _slowed(free)
        late = result is None or after is None or after > 20 or bool(result["left"])
        if result is not None:
            goodputs.append(result["gradients_per_s"] / whole["gradients_per_s"])
            slower.append(times)
            named_after += [] if after is None else [after]
            late |= goodputs[-1] < 0.7
        stale, _, _, lead = _slowed(bounded)
        late |= stale is None or lead > BOUND or bool(stale["left"])
        said = f"named after {after}, goodput {goodputs[-1:]}, {lead} steps ahead"
        outcome.trial(said if late else None, named=after is not None, said=said)
    outcome.figures |= {
        "goodput_least": min(goodputs, default=0.0),
        "named_after_steps_most": max(named_after, default=0),
    }
    outcome.figures |= {"times_slower": median(slower) if slower else 0.0}
    return outcome


def _slowed(given: dict[str, Any]) -> tuple[dict[str, Any] | None, int | None, float, int]:
    """Slow replica 2.

    Returns:
        The result, after how many of its steps it was named, how many times slower it was than the others are then, and
        the most steps that one replica was ahead of another.
    """
    with slow_group(0.1) as group, trainee(**given) as run:
        run.wait_for(lambda each: each.step >= 20)
        pid = next((each["pid"] for each in run.workers() if each["replica"] == 2), None)
        if pid is None:
            return run.result(), None, 0.0, 0
        at = inject("a tenth of a core for", pid)
        (group / "cgroup.procs").write_text(str(pid))
        result = run.result()
        steps, remarks = run.all_begun(), run.remarks()
    since = [[each.time_s for each in steps if each.replica == r and each.time_s > at] for r in range(4)]
    own, paces = [each.time_s for each in steps if each.replica == 2], [_pace(times) for times in since]
    slower = paces[2] / max(median([*paces[:2], paces[3]]), 1e-9)
    first = next(
        (time_s for time_s, kind, replica in remarks if kind == "stragglers" and replica == 2 and time_s > at), None
    )
    named = None if first is None else sum(at < time_s <= first for time_s in own)
    arrived = [(time_s, replica) for time_s, kind, replica in remarks if kind == "arrived"]
    return result, named, slower, _lead(steps, arrived)


def _lead(steps: list[Begun], arrived: list[tuple[float, int]]) -> int:
    """Return the most steps that a replica had completed when it began one, beyond those of the slowest.

    Args:
        steps: as they were begun.
        arrived: when main had a Δ, and of which replica. A worker without a core is late to note that it has sent one.
    """
    completed, most = dict.fromkeys((each.replica for each in steps), 0), 0
    events = [*((time_s, replica, None) for time_s, replica in arrived), *(each[:3] for each in steps)]
    for _, replica, step in sorted(events, key=lambda event: event[0]):
        if step is None:
            completed[replica] += 1
        else:
            most = max(most, step - 1 - min(completed.values()))
    return most


def _pace(begun: list[float]) -> float:
    return (begun[-1] - begun[0]) / (len(begun) - 1) if len(begun) > 1 else 0.0
