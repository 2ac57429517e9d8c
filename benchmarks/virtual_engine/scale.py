"""Time and memory of 10,000 replicas in virtual time until they have sent a million Δs, with tensors and without.

    python benchmarks/virtual_engine/scale.py           # all rows, each run in a process of its own
    python benchmarks/virtual_engine/scale.py --kind "without tensors" --policy asynchronous --rounds 3
    python benchmarks/virtual_engine/scale.py --page    # the README's last section

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.machine import described, machine
from kit.sheet import Row, Sheet
from kit.words import grid

HERE = Path(__file__).parent
REPLICAS = 10_000
STEPS = 100
"""Of each replica."""
POLICIES = ("asynchronous", "smooth-switch:every=500", "stale-synchronous:bound=3", "synchronous")
NETWORK = ("asynchronous",)
TIMES = "compute=exponential:mean=1 apply=1e-6"
SERVERS = 8
SIZE_BYTES = 4 * 1002
CLUSTER = """hosts = 1000

[links]
inside_bytes_per_s = 10e9
between_bytes_per_s = 1e7
latency_s = 1e-4

[failures]
mean_time_between_s = 1000.0
mean_time_to_repair_s = 10.0
"""
KINDS = {
    "without tensors": POLICIES,
    "without tensors, network": NETWORK,
    "1,002 parameters": POLICIES,
    "1,002 parameters, network": NETWORK,
}
"""What is measured under which policies."""


def simulated(policy: str, times: str, **network: Any) -> int:
    """Simulate without a model; return the updates."""
    from paceline import pace

    # Means over the whole run: its updates are those of all Δs.
    return pace(policy, REPLICAS, times, arrivals=REPLICAS * STEPS, warm_up=0.0, **network).updates


def trained(policy: str, times: str, servers: str = "") -> int:
    """Train a model of 1,002 parameters; return the updates."""
    import torch
    from torch import nn

    from paceline import Program, train

    inputs = torch.randn(32 * REPLICAS, 20, generator=torch.Generator().manual_seed(0))
    program = Program(
        model=lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10)),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        train=(inputs, inputs[:, :10].argmax(1)),
        batch_size=32,
    )
    strategy = f"replicas={REPLICAS} aggregation={policy}{servers}"
    run = train(program, strategy, engine="virtual", steps=STEPS, times=times, progress=False)
    return int(run.summary["updates"])


def once(kind: str, policy: str) -> dict[str, float]:
    """Run once, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(CLUSTER)
        over_network = f"{TIMES} network={path}"
        began, began_cpu = time.perf_counter(), time.process_time()
        match kind:
            case "without tensors":
                updates = simulated(policy, TIMES)
            case "without tensors, network":
                updates = simulated(policy, over_network, size_bytes=SIZE_BYTES, servers=SERVERS)
            case "1,002 parameters":
                updates = trained(policy, TIMES)
            case _:
                updates = trained(policy, over_network, f" servers={SERVERS}")
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    return {"updates": updates, "seconds": seconds, "cpu_s": cpu_s, "peak_mib": peak_mib()}


def peak_mib() -> float:
    """Return the largest memory of this process; ``ru_maxrss`` has that of its parent, too, if that was larger."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def measure(sheet: Sheet, kinds: Sequence[str], policies: Sequence[str], rounds: int) -> None:
    """Run what is not there yet, each in a process of its own with one thread."""
    for number in range(rounds):
        for kind in kinds:
            for policy in (each for each in KINDS[kind] if each in policies):
                if sheet.find(kind, policy, number) is not None:
                    continue
                # Of the last minute before the run: what it shared the machine with.
                facts = {"kind": kind, "policy": policy, "round": number, "load": os.getloadavg()[0]}
                command = [sys.executable, __file__, "--once", kind, policy]
                told = subprocess.check_output(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
                sheet.put(facts | json.loads(told) | machine())
                print(sheet.find(kind, policy, number), flush=True)


def page(rows: Sequence[Row], path: Path) -> None:
    """Write the last section of a page from the rows."""
    lines = []
    for kind, policies in KINDS.items():
        for policy in policies:
            own = [row for row in rows if (row["kind"], row["policy"]) == (kind, policy)]
            if own:
                keys = ("updates", "seconds", "cpu_s", "peak_mib", "load")
                updates, seconds, cpu_s, peak, load = (median(float(row[key]) for row in own) for key in keys)
                cells = f"{updates:,.0f}", f"{seconds:.0f}", f"{cpu_s:.0f}", f"{peak:,.0f}", f"{load:.1f}", len(own)
                lines.append((f"`{policy}`", kind, *cells))
    table = grid(("policy", "", "updates", "s", "CPU s", "peak MiB", "load", "runs"), lines)
    before = path.read_text(encoding="utf-8").partition(TITLE)[0]
    text = "\n\n".join([TITLE + HEAD, table, f"Machine: {described(rows)}."])
    path.write_text(f"{before}{text}\n", encoding="utf-8")


TITLE = "## Scale\n"
HEAD = f"""
{REPLICAS:,} replicas until they have sent {REPLICAS * STEPS:,} Δs, in one thread: simulated without a model
(`paceline.pace`), and trained with one of 1,002 parameters (20-32-10). The aims for as many updates: 60 s and 2 GB
without tensors, 10 minutes with them. The network has 1,000 hosts and {SERVERS} servers; a link carries one message at
a time, and those of the servers are busy about half of the time. The hosts fail and come back, and Δs on their way are
lost with them.

    python benchmarks/virtual_engine/scale.py

Medians of the runs, from the import of the package to the result. *load* is that of the machine in the minute before,
for other work ran beside: where s is above CPU s, a run waited for a core."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not there yet, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="left out: all")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="left out: all")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each")
    parser.add_argument("--page", action="store_true", help="write the section alone")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and README.md")
    parser.add_argument("--once", nargs=2, metavar=("KIND", "POLICY"), help=argparse.SUPPRESS)
    said = parser.parse_args(arguments)
    if said.once:
        print(json.dumps(once(*said.once)))
        return
    sheet = Sheet(said.out / "results" / "scale.csv", ("kind", "policy", "round"))
    if not said.page:
        measure(sheet, said.kind or list(KINDS), said.policy or POLICIES, said.rounds)
    page(sheet.rows, said.out / "README.md")


if __name__ == "__main__":
    main()
