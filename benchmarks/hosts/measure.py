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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import ADDRESS, cluster, in_host
from kit.hosts import address, hosts, why_not
from kit.machine import described, machine
from kit.sheet import Row, Sheet
from kit.words import grid

HERE = Path(__file__).parent
INSIDE = "PACELINE_HOSTS_INSIDE"
"""Environment variable: this process is in a namespace of processes of its own."""

INHERITED = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
"""Folders of modules that this process was started with."""

FIRST_STEPS = 2
"""Steps of each worker before those that count."""

KEYS = ("side", "mbit", "hosts", "apart", "workers", "servers", "parameters", "round", "compression", "more")

FORMS, POLICIES = ("", "stages=2 micro_batches=2", "shards=2"), ("asynchronous", "smooth-switch:every=50")
"""Of replicas that compute."""

COMPUTING = 1_002_000
"""Parameters of those."""

WORKERS = {22_000: (8,), 1_000_000: (8, 16), 25_000_000: (8, 16)}
"""More than one on each host."""

SIZES, SERVERS, COMPRESSIONS = (22_000, 1_000_000, 25_000_000), (1, 2, 4), ("fp16", "top-k:ratio=0.01")


@dataclass(frozen=True)
class Case:
    """One row.

    Args:
        side: ``paceline``, ``ray`` (its parameter server), ``gloo`` (an all-reduce) or ``sockets`` (a ring).
        mbit: of each host's link, each way; 0: it has no limit.
        hosts: their number.
        apart: whether the first half of them has servers alone, and the other half workers.
        workers: their number.
        servers: of A.
        parameters: of A.
        round: number of the repetition.
        compression: of what is pushed.
        more: words of the strategy, for replicas that compute; empty: they are asynchronous, and compute nothing.
    """

    side: str
    mbit: int
    hosts: int
    apart: bool
    workers: int
    servers: int
    parameters: int
    round: int
    compression: str = "none"
    more: str = ""

    @property
    def seconds(self) -> float:
        """How long to measure."""
        if self.parameters <= COMPUTING:
            return 8.0
        if self.apart:
            return 8.0 * max(8, self.workers)  # of one server's link, the worst: some eight steps of each worker
        return 7.5 * max(4, self.workers)


def measured(case: Case, seconds: float | None = None) -> dict[str, float]:
    """Return gradients applied a second, and bytes that all hosts have sent for each.

    Args:
        case: of the row.
        seconds: how long to measure; None: as long as the case says.
    """
    seconds = case.seconds if seconds is None else seconds
    with hosts(case.hosts, case.mbit or None, both_ways=True) as names:
        if case.side in ("gloo", "sockets"):
            return on_links(case, names, seconds)
        busy = case.hosts // 2 if case.apart else 0
        cores = [0] * busy + [2] * (case.hosts - busy)
        folders = [str(HERE), str(HERE.parent / "parameter_server"), *INHERITED]
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)  # of all actors
        with cluster(names, cores) as environment, tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, str(HERE / "driver.py"), case.side, "--address", ADDRESS, "--folder", folder]
            words += ["--workers", str(case.workers), "--servers", str(case.servers)]
            words += ["--parameters", str(case.parameters), "--seconds", str(seconds)]
            words += ["--compression", case.compression, "--more", case.more]
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


def on_links(case: Case, names: Sequence[str], seconds: float) -> dict[str, float]:
    """Return the figures of one process on each host, without Ray."""
    words = ["ring" if case.side == "sockets" else "gloo", "--seconds", str(seconds)]
    words += ["--parameters", str(case.parameters), "--addresses", *(address(i) for i in range(case.hosts))]
    command = [sys.executable, str(HERE / "links.py"), *words, "--rank"]
    running = [
        subprocess.Popen(in_host(name, *command, str(i)), stdout=subprocess.PIPE, text=True)
        for i, name in enumerate(names)
    ]
    rates = [float(process.communicate(timeout=seconds + 120)[0]) for process in running]
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
        for parameters in SIZES:
            together = {"mbit": 1000, "hosts": 4, "apart": False, "parameters": parameters, "round": number}
            found += [Case("paceline", workers=4, servers=servers, **together) for servers in SERVERS]
            found += [Case("paceline", workers=4, servers=4, compression=text, **together) for text in COMPRESSIONS]
            found += [Case("ray", workers=4, servers=1, **together), Case("gloo", workers=4, servers=0, **together)]
            found += [Case("paceline", workers=many, servers=4, **together) for many in WORKERS[parameters]]
        computing = {"mbit": 1000, "hosts": 4, "apart": False, "parameters": COMPUTING, "round": number}
        found += [
            Case("paceline", workers=4, servers=4, more=f"{form} aggregation={policy}".strip(), **computing)
            for form in FORMS
            for policy in POLICIES
        ]
        ahead = "aggregation=asynchronous pull_ahead=true"
        found.append(Case("paceline", workers=4, servers=4, more=ahead, **computing))
        apart = {"mbit": 200, "hosts": 8, "apart": True, "parameters": 5_000_000, "round": number}
        found += [Case("paceline", workers=8, servers=servers, **apart) for servers in SERVERS]
        found += [Case("paceline", workers=24, servers=servers, **apart) for servers in (4, 1)]
        found.append(Case("ray", workers=8, servers=1, **apart))
        found += [Case("sockets", mbit, hosts, False, hosts, 0, 0, number) for mbit, hosts in ((1000, 4), (200, 8))]
    return found


def page(sheet: Sheet, folder: Path) -> None:
    """Write README.md from the rows."""
    tables = list[str]()
    raw = {k: median(float(r["sent_bytes_per_s"]) for r in rows) for k, rows in grouped(sheet, "sockets").items()}
    for title, key in TITLES.items():
        rows = list[tuple[object, ...]]()
        for (side, parameters, workers, servers, compression, more), found in rows_of(sheet, key).items():
            rate, sent, each = (median(float(row[name]) for row in found) for name in FIGURES)
            told = [side, *([] if compression == "none" else [compression]), *([f"`{more}`"] if more else [])]
            name = ", ".join(told)
            carried = f"{sent / raw[key]:.2f}" if key in raw else ""
            mb = f"{each / 1e6:.3g}"
            rows.append(
                (name, parameters, workers, servers, f"{rate:.3g}", mb, f"{sent / 1e6:.0f}", carried, len(found))
            )
        if rows:
            tables.append(f"## {title}\n\n{grid(HEAD, rows)}")
    where = f"Machine: {described(sheet.rows)}."
    (folder / "README.md").write_text("\n\n".join([TEXT, *tables, where]) + "\n", encoding="utf-8")


def grouped(sheet: Sheet, side: str) -> dict[tuple[str, str, str], list[Row]]:
    """Return the rows of a side by rate of the links, hosts, and whether workers are apart."""
    found = defaultdict[tuple[str, str, str], list[Row]](list)
    for row in sheet.rows:
        if row["side"] == side:
            apart = str(int(row["hosts"]) == 8)
            found[row["mbit"], row["hosts"], apart].append(row)
    return found


def rows_of(sheet: Sheet, key: tuple[str, str, str]) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows of one table, by what they differ in."""
    found = defaultdict[tuple[str, ...], list[Row]](list)
    for row in sheet.rows:
        if row["side"] != "sockets" and (row["mbit"], row["hosts"], row["apart"]) == key:
            found[tuple(row[name] for name in DIFFER)].append(row)
    return found


TEXT = """# Servers on several hosts

Asynchronous replicas that compute nothing, so that what carries Δ and A alone is measured. Hosts are network
namespaces, each with a node of Ray and a link that `tc tbf` limits in both directions; a bridge joins them. All of them
share this machine's cores, which also move every byte of every link.

    python benchmarks/hosts/measure.py            # needs root
    python benchmarks/hosts/measure.py --page

`ray` is Ray's own pattern, one actor that answers each push with A by the object store; `gloo` is an all-reduce of
all ranks' gradients in lockstep, of which each round applies as many. A worker on a server's own host shares its
memory, and with one server makes most updates by itself; where workers are apart none does. Rows with a strategy are
replicas that compute: four layers of 500 × 500, batches of 8, each worker of a replica a process. Bytes are those that
all hosts have sent, by their interfaces (Gloo: by the ring's formula); of raw sockets: beside what these sent in a ring
over the same links, all at the same time. Medians of the rounds. Replicas of 22,000 and of 1,000,000 parameters that
compute nothing, those with `pull_ahead`, and 24 workers apart were measured on the first of the machines named below,
others on the second; of asynchronous ones of 1,002,000 parameters, and of 16 of 25,000,000, each machine has rounds.
[What the planner predicts of such hosts](../planner/hosts.md) is another page."""

HEAD = (
    *("", "parameters", "workers", "servers", "Δs applied a second", "MB sent for each"),
    *("MB/s on all links", "of raw sockets", "rounds"),
)
DIFFER = ("side", "parameters", "workers", "servers", "compression", "more")
FIGURES = ("updates_per_s", "sent_bytes_per_s", "sent_bytes_per_update")
TITLES = {
    "Four hosts of 1 Gbit/s, a worker on each": ("1000", "4", "False"),
    "Workers apart: four hosts for servers, workers on four others, 200 Mbit/s": ("200", "8", "True"),
}


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
    page(sheet, said.out)


if __name__ == "__main__":
    main()
