"""A in one or more servers on hosts with links of a given rate, beside Ray's own pattern and Gloo (needs root).

    python benchmarks/hosts/measure.py            # what is not measured yet
    python benchmarks/hosts/measure.py --page

Hosts are network namespaces of one machine, each with a node of Ray; rows lie in results/ as they come.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import ADDRESS, cluster, in_host
from driver import FIRST_STEPS
from kit.hosts import address, hosts, why_not
from kit.machine import machine
from kit.sheet import Sheet

HERE = Path(__file__).parent
INSIDE = "PACELINE_HOSTS_INSIDE"

KEYS = ("side", "mbit", "hosts", "apart", "workers", "servers", "parameters", "round")


@dataclass(frozen=True)
class Case:
    """One row.

    Args:
        side: ``paceline``, ``ray`` (its parameter server), ``gloo`` (an all-reduce) or ``sockets`` (a ring).
        mbit: of each host's link, each way.
        hosts: their number.
        apart: whether the first half of them has servers alone, and the other half workers.
        workers: their number.
        servers: of A.
        parameters: of A.
        round: number of the repetition.
    """

    side: str
    mbit: int
    hosts: int
    apart: bool
    workers: int
    servers: int
    parameters: int
    round: int

    @property
    def seconds(self) -> float:
        """How long to measure."""
        return 30.0 if self.parameters > 10**7 else 8.0


def measured(case: Case) -> dict[str, float]:
    """Return gradients applied a second, and bytes that all hosts have sent for each."""
    with hosts(case.hosts, case.mbit, both_ways=True) as names:
        if case.side in ("gloo", "sockets"):
            return on_links(case, names)
        busy = case.hosts // 2 if case.apart else 0
        cores = [0] * busy + [2] * (case.hosts - busy)
        with cluster(names, cores) as environment, tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, str(HERE / "driver.py"), case.side, "--address", ADDRESS, "--folder", folder]
            words += ["--workers", str(case.workers), "--servers", str(case.servers)]
            words += ["--parameters", str(case.parameters), "--seconds", str(case.seconds)]
            process = subprocess.Popen(in_host(names[0], *words), env=environment)
            samples = list[tuple[float, int]]()
            while process.poll() is None:
                samples.append((time.monotonic(), sum(map(sent_bytes, names))))
                time.sleep(0.05)  # the interval of the samples
            if process.returncode:
                raise RuntimeError(f"the driver ended with {process.returncode}")
            ends = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("worker-*.json"))]
            return figures(ends, samples)


def figures(ends: Sequence[Sequence[float]], samples: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Return the rates between the time when all workers had warmed up and the first one's end.

    Args:
        ends: when each step of each worker ended.
        samples: times, and the bytes that all hosts have sent by then.
    """
    begin, end = max(steps[FIRST_STEPS] for steps in ends), min(steps[-1] for steps in ends)
    count = sum(begin < t <= end for steps in ends for t in steps)
    inside = [(t, sent) for t, sent in samples if begin <= t <= end]
    (t0, sent0), (t1, sent1) = inside[0], inside[-1]
    rate = count / (end - begin)
    per_s = (sent1 - sent0) / (t1 - t0)
    return {"updates_per_s": rate, "sent_bytes_per_s": per_s, "sent_bytes_per_update": per_s / rate}


def on_links(case: Case, names: Sequence[str]) -> dict[str, float]:
    """Return the figures of one process on each host, without Ray."""
    words = ["ring" if case.side == "sockets" else "gloo", "--seconds", str(case.seconds)]
    words += ["--parameters", str(case.parameters), "--addresses", *(address(i) for i in range(case.hosts))]
    command = [sys.executable, str(HERE / "links.py"), *words, "--rank"]
    running = [
        subprocess.Popen(in_host(name, *command, str(i)), stdout=subprocess.PIPE, text=True)
        for i, name in enumerate(names)
    ]
    rates = [float(process.communicate(timeout=case.seconds + 120)[0]) for process in running]
    if case.side == "sockets":
        return {"updates_per_s": 0.0, "sent_bytes_per_s": sum(rates), "sent_bytes_per_update": 0.0}
    sent = 2 * (case.hosts - 1) / case.hosts * 4 * case.parameters  # of the ring, by its formula, for each gradient
    return {"updates_per_s": rates[0], "sent_bytes_per_s": rates[0] * sent, "sent_bytes_per_update": sent}


def sent_bytes(name: str) -> int:
    """Return how many bytes a host has sent."""
    counter = "/sys/class/net/eth0/statistics/tx_bytes"
    return int(subprocess.run(in_host(name, "cat", counter), capture_output=True, check=True, timeout=20).stdout)


def cases(rounds: int) -> list[Case]:
    """Return all rows, a round of all before the next."""
    found = list[Case]()
    for number in range(rounds):
        for mbit in (1000,):
            found.append(Case("sockets", mbit, 4, False, 4, 0, 0, number))
            for parameters in (22_000, 1_000_000, 25_000_000):
                for workers in (2, 4, 8):
                    found += [Case("paceline", mbit, 4, False, workers, s, parameters, number) for s in (1, 2, 4)]
                    found.append(Case("ray", mbit, 4, False, workers, 1, parameters, number))
                found.append(Case("gloo", mbit, 4, False, 4, 0, parameters, number))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not there yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write README.md alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="values of a row's keys: side=paceline,workers=4")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and README.md")
    said = parser.parse_args(arguments)
    sheet = Sheet(said.out / "results" / "rates.csv", KEYS)
    if not said.page and (reason := why_not()):
        raise SystemExit(reason)
    if not said.page and INSIDE not in os.environ:
        # All processes of all hosts in a namespace of processes that ends with this one.
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        again = [*apart, sys.executable, *sys.argv]
        raise SystemExit(subprocess.run(again, env=os.environ | {INSIDE: "1"}, check=False).returncode)
    only = dict(pair.split("=") for pair in said.only.split(",") if pair)
    for case in [] if said.page else cases(said.rounds):
        named = dict(zip(KEYS, map(str, astuple(case)), strict=True))
        if sheet.find(*astuple(case)) is None and named.items() >= only.items():
            print(case, flush=True)
            sheet.put({**named, **measured(case), **machine()})


if __name__ == "__main__":
    main()
