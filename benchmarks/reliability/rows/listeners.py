"""R17: which sockets listen while a run lasts, and what strangers can do at them."""

import contextlib
import ipaddress
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from injector import Trainee, living, torchrun, trainee, undisturbed

from rows.contract import DDP, Observed, Outcome, compared, row

BY_HAND = (sys.executable, str(Path(__file__).parents[1] / "by_hand.py"), "2")

ENGINES: dict[str, dict[str, Any]] = {
    "virtual": {"engine": "virtual", "strategy": "replicas=2"},
    "local": {"engine": "local", "strategy": "replicas=2"},
    "local, stages": {"engine": "local", "strategy": "replicas=1 stages=2"},
    "ranks by hand, Gloo": {"engine": "distributed:gloo", "strategy": "replicas=2", "launcher": BY_HAND},
    "ranks by hand, shm": {"engine": "distributed:shm", "strategy": "replicas=2", "launcher": BY_HAND},
    "torchrun": {"engine": "distributed", "strategy": "replicas=2", "launcher": torchrun(2)},
    "Ray": {"engine": "ray", "strategy": "replicas=2"},
}
STEPS = 300

# What strangers do while a run lasts: connections with noise, with the opening of a store's client, and half-open ones.
NOISE, OPENINGS, HALF_OPEN = 10_000, 1_000, 200


@dataclass(frozen=True)
class Listener:
    """A socket that listens.

    Args:
        address: as an IP address.
        process: name of the process that has it.
        command: of that process.
    """

    address: str
    port: int
    process: str
    command: str = field(repr=False)

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        if isinstance(address, ipaddress.IPv6Address):  # gRPC writes 127.0.0.1 as ::ffff:127.0.0.1
            address = address.ipv4_mapped or address
        return address.is_loopback

    @property
    def torchruns(self) -> bool:
        """Whether torchrun's agent has it: it started the ranks, and knows nothing of Paceline."""
        return "torch.distributed.run" in self.command


def listeners(folder: str) -> list[Listener]:
    """Return the listening TCP sockets of all processes of a trainee."""
    held = dict[str, int]()
    for pid in living(folder):
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                held[os.readlink(fd)] = pid
    found: list[Listener] = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for words in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            pid = held.get(f"socket:[{words[9]}]")
            if words[3] == "0A" and pid is not None:
                address, _, port = words[1].partition(":")
                numbers = [bytes.fromhex(address)[i : i + 4][::-1] for i in range(0, len(address) // 2, 4)]
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                    process = Path(f"/proc/{pid}/comm").read_text().strip()
                    host = socket.inet_ntop(family, b"".join(numbers))
                    found.append(Listener(host, int(port, 16), process, command))
    return found


@row("listeners", trials=len(ENGINES))
def sockets_that_listen(trials: int) -> Outcome:
    """R17: all listening sockets of a run's processes, on each engine; torchrun's own are counted apart."""
    outcome = Outcome(
        "R17",
        f"sockets that listen during a run by default: {', '.join(ENGINES)}",
        "none on another interface than loopback; those of torchrun's agent are counted apart",
    )
    for i in range(trials):
        name = list(ENGINES)[i % len(ENGINES)]
        with trainee(steps=STEPS, pause_s=0.02, **ENGINES[name]) as run:
            begun = run.wait_for_step()
            found = listeners(str(run.folder))
        open_ = [each for each in found if not each.loopback and not each.torchruns]
        failure = f"{name}: {open_}" if open_ else None if begun is not None else f"{name}: did not train"
        outcome.trial(failure)
        outcome.figures[f"{name}"] = len(found)
        outcome.figures["torchrun's, on all interfaces"] = outcome.figures.get(
            "torchrun's, on all interfaces", 0
        ) + sum(each.torchruns and not each.loopback for each in found)
    return outcome


@compared("listeners", DDP, trials=1)
def sockets_of_ddp(trials: int) -> Observed:
    """The store of init_process_group("env://"): B12."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    own = [words[1] for words in rows if words[3] == "0A" and words[1].endswith(f":{store.port:04X}")]
    everywhere = sum(not address.startswith("0100007F") for address in own)
    return Observed(trials, "the store of MASTER_ADDR=127.0.0.1 listens on all interfaces", {"everywhere": everywhere})


def opening_of_a_client() -> bytes:
    """Return what a client of torch's store says first, as anybody who has seen one connect can say again."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def connect() -> None:
            with contextlib.suppress(Exception):
                TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))

        threading.Thread(target=connect, daemon=True).start()
        server.settimeout(30)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(30)
            return connection.recv(4096)


def disturb(ports: Sequence[int], run: Trainee, share: float) -> Counter[str]:
    """Connect to ports until the run has ended or everything has been done; return what was done."""
    draw, done, opening = random.Random(23), Counter[str](), opening_of_a_client()
    with contextlib.ExitStack() as held:
        for i in range(round(HALF_OPEN * share)):
            done["half_open"] += _send(ports[i % len(ports)], b"", held)
        for i in range(round(NOISE * share)):
            if run.process.poll() is not None:
                break
            done["noise"] += _send(ports[i % len(ports)], draw.randbytes(draw.randrange(1, 512)), None)
            if i % (NOISE // OPENINGS) == 0:
                done["openings"] += _send(ports[i % len(ports)], opening, None)
            time.sleep(0.001)  # so that the strangers' own work is not what slows the run
        done["ended_first"] = run.process.poll() is not None
        run.wait_for(lambda each: False, bound_s=0.0)
    return done


def _send(port: int, content: bytes, held: contextlib.ExitStack | None) -> bool:
    """Connect and send; keep the connection open in ``held``, else close it."""
    try:
        connection = socket.create_connection(("127.0.0.1", port), timeout=5)
        if held is not None:
            held.enter_context(connection)
            return True
        with connection:
            connection.sendall(content)
    except OSError:
        return False
    return True


def resident_mb(pids: Sequence[int]) -> float:
    """Return the resident memory of processes."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
    return total


@contextlib.contextmanager
def _started(steps: int) -> Iterator[Trainee]:
    with trainee(steps=steps, pause_s=0.01, **ENGINES["ranks by hand, Gloo"]) as run:
        yield run


@row("strangers", trials=3)
def strangers_connect(trials: int) -> Outcome:
    """R17: noise, openings and half-open connections at every port of two ranks that train over Gloo."""
    outcome = Outcome(
        "R17",
        f"{NOISE:,} malformed frames, {OPENINGS:,} replayed openings, {HALF_OPEN} half-open connections to 2 ranks",
        "all bits and steps as without; time ≤ 5 % longer; memory ≤ 50 MB more",
    )
    steps = 1500
    whole = undisturbed(steps=steps, pause_s=0.01, **ENGINES["ranks by hand, Gloo"])
    for _ in range(trials):
        with _started(steps) as run:
            run.wait_for_step()
            ports = sorted({each.port for each in listeners(str(run.folder))})
            pids = living(str(run.folder))
            before = resident_mb(pids)
            done = disturb(ports, run, 1.0)
            grown = resident_mb(pids) - before
            result = run.result()
        failure = None
        if result is None:
            failure = f"the run ended badly after {dict(done)} at {ports}"
        elif result["digest"] != whole["digest"] or result["updates"] != whole["updates"]:
            failure = "it ended with other bits or steps"
        elif done["ended_first"]:
            failure = f"the run was too short for all: {dict(done)}"
        elif result["seconds"] > 1.05 * whole["seconds"]:
            failure = f"{result['seconds'] / whole['seconds'] - 1:.1%} longer"
        elif grown > 50:
            failure = f"{grown:.0f} MB more memory"
        outcome.trial(failure)
        outcome.figures |= {f"{name}": count for name, count in done.items()}
        outcome.figures |= {"ports": len(ports), "grown_mb": grown}
        if result is not None:
            outcome.figures["time_ratio"] = result["seconds"] / whole["seconds"]
    return outcome
