"""R15: jobs whose ranks don't fit together, started by hand as by any launcher that sets RANK and WORLD_SIZE."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rows.contract import DDP, Observed, Outcome, compared, row, times

SCRIPT = Path(__file__).parents[1] / "launch_trainee.py"

# All have to end within this time of the last one's arrival.
BOUND_S = 10.0
# Ranks that have not ended by then hang.
HANG_S = 60.0


@dataclass(frozen=True)
class Wrong:
    """One way to start a job wrongly.

    Args:
        named: what the message of each rank must match.
        ranks: (rank, number of ranks) of each process.
        occupied: whether another program listens at the port.
    """

    named: str
    ranks: Sequence[tuple[int, int]] = ((0, 2), (1, 2))
    occupied: bool = False


def differing(field: str) -> Wrong:
    return Wrong(rf"{field}.* is .* in rank 0.*, but .* in rank 1|{field}.* is .* in rank 1.*, but .* in rank 0")


WRONG: dict[str, Wrong] = {
    "twice": Wrong(r"rank 1 was started twice: process \d+ on \S+ and process \d+", ((0, 3), (1, 3), (1, 3))),
    "missing": Wrong(r"waited 5 s for rank 2 of 3, and only rank", ((0, 3), (1, 3))),
    "size": Wrong(differing("number of ranks").named, ((0, 2), (1, 3))),
    "port": Wrong(r"found no store of torch at .* MASTER_PORT=\d+: process \d+ \(\S+\) listens there", occupied=True),
    "torch": differing("version of torch"),
    "paceline": differing("version of Paceline"),
    "strategy": differing("strategy"),
    "shape": differing("first.weight"),
    "order": differing("model"),
    "dtype": differing("first.weight"),
    "model": differing("code of the model"),
    "loss": differing("loss"),
    "seed": differing("seed"),
    "data": differing("training set"),
    "rate": differing("lr of the optimizer"),
    "optimizer": differing("optimizer"),
    "batch": differing("batch size"),
    "clip": differing("clip_norm"),
}


@dataclass(frozen=True)
class Ended:
    """How one rank ended.

    Args:
        code: its exit code; None: it hung.
        told: the message.
        seconds: from the last rank's arrival.
    """

    code: int | None
    told: str
    seconds: float


def start(system: str, kind: str) -> list[Ended]:
    """Start a job wrongly, and return how its ranks ended."""
    wrong = WRONG[kind]
    with _port(occupied=wrong.occupied) as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), system, kind],
                env=os.environ | _launched(rank, size, port),
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )
            for rank, size in wrong.ranks
        ]  # fmt: skip
        try:
            ends = _ends(ranks)
        finally:
            for process in ranks:
                process.kill()
        said = [process.communicate()[0] for process in ranks]
    arrived = max(float(each.split()[1]) for each in said)
    return [
        Ended(
            None if end is None else process.returncode, text.partition("told ")[2], (end or time.monotonic()) - arrived
        )
        for process, end, text in zip(ranks, ends, said, strict=True)
    ]


def _launched(rank: int, size: int, port: int) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return address | {"RANK": str(rank), "WORLD_SIZE": str(size)}


def _ends(ranks: "Sequence[subprocess.Popen[str]]") -> list[float | None]:
    """Return when each process ended, or None if it did not."""
    ends: list[float | None] = [None] * len(ranks)
    deadline = time.monotonic() + HANG_S
    while None in ends and time.monotonic() < deadline:
        for i, process in enumerate(ranks):
            if ends[i] is None and process.poll() is not None:
                ends[i] = time.monotonic()
        time.sleep(0.01)
    return ends


@contextlib.contextmanager
def _port(*, occupied: bool) -> Iterator[int]:
    """Context manager: a free port, or one at which a program listens that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        if occupied:
            yield port
    if not occupied:
        yield port


def judge(kind: str, ended: Sequence[Ended]) -> str | None:
    """Return what is wrong with how ranks ended, or None."""
    for each in ended:
        if each.code is None:
            return f"{kind}: a rank hung"
        if each.code == 0:
            return f"{kind}: a rank trained to the end"
        if each.code != 1:
            return f"{kind}: a rank ended with {each.code}"
        if each.seconds > BOUND_S:
            return f"{kind}: a rank ended after {each.seconds:.1f} s"
        if not re.search(WRONG[kind].named, each.told):
            return f"{kind}: does not name both: {each.told[:300]}"
    return None


@row("launch", trials=180)
def start_wrongly(trials: int) -> Outcome:
    """R15: each of 18 kinds so many times."""
    outcome = Outcome(
        "R15",
        f"jobs started wrongly, {len(WRONG)} kinds: {', '.join(WRONG)}",
        "all ranks end ≤ 10 s after the last one's arrival and name both and the field; no hang, abort, silent run",
    )
    seconds = list[float]()
    for i in range(trials):
        kind = list(WRONG)[i % len(WRONG)]
        ended = start("paceline", kind)
        seconds += [each.seconds for each in ended]
        wrong = judge(kind, ended)
        outcome.trial(wrong, named=all(each.told for each in ended), said=str(ended))
    outcome.figures |= times(seconds, "end")
    return outcome


@compared("launch", DDP, trials=len(WRONG))
def start_ddp_wrongly(trials: int) -> Observed:
    """The same by plain DistributedDataParallel on Gloo with a timeout of 5 s."""
    found, kinds = Counter[str](), list(WRONG)
    for i in range(trials):
        kind = kinds[i % len(kinds)]
        ended = start("ddp", kind)
        codes = [each.code for each in ended]
        found["hung"] += None in codes
        found["aborted"] += any(code is not None and code < 0 for code in codes)
        found["trained_on"] += all(code == 0 for code in codes)
        found["named"] += judge(kind, ended) is None
    return Observed(trials, "names neither rank nor field, and trains on in most kinds", dict(found))
