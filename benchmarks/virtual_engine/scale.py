"""Time and memory of 10,000 replicas in virtual time until they have sent a million Δs, with tensors and without."""

import functools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

REPEATS = 3
REPLICAS = 10_000
STEPS = 100
"""Of each replica."""
POLICIES = ("asynchronous", "smooth-switch:every=500", "stale-synchronous:bound=3", "synchronous")
TIMES = "compute=exponential:mean=1 apply=1e-6"
CLUSTER = """
hosts = 1000
[links]
inside_bytes_per_s = 10e9
between_bytes_per_s = 1.25e9
latency_s = 1e-4
[failures]
mean_time_between_s = 1000.0
mean_time_to_repair_s = 10.0
"""
KINDS = ("without tensors", "without tensors, network", "1,002 parameters", "1,002 parameters, network")


def simulated(policy: str, **network: Any) -> int:
    """Simulate without a model; return the updates."""
    from paceline import pace

    # Means over the whole run: its updates are those of all Δs.
    found = pace(policy, REPLICAS, network.pop("times", TIMES), arrivals=REPLICAS * STEPS, warm_up=0.0, **network)
    return found.updates


def trained(policy: str, servers: str = "", times: str = TIMES) -> int:
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


def once(policy: str, kind: str) -> dict[str, float]:
    """Run once, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(CLUSTER)
        times = f"{TIMES} network={path}"
        began, began_cpu = time.perf_counter(), time.process_time()
        match kind:
            case "without tensors":
                updates = simulated(policy)
            case "without tensors, network":
                updates = simulated(policy, times=times, size_bytes=4008, servers=8)
            case "1,002 parameters":
                updates = trained(policy)
            case _:
                updates = trained(policy, " servers=8", times)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"updates": updates, "seconds": seconds, "cpu_s": cpu_s, "peak_mib": peak}


def main() -> None:
    """Print rows of the table: ``scale.py [KIND [POLICY ...]]``; each run has a process of its own."""
    if sys.argv[1:2] == ["once"]:
        print(json.dumps(once(*sys.argv[2:])))
        return
    kinds, policies = sys.argv[1:2] or KINDS, sys.argv[2:] or POLICIES
    print("| policy | | updates | s | CPU s | peak MiB |\n|---|---|---|---|---|---|")
    for kind in kinds:
        for policy in policies:
            command = [sys.executable, __file__, "once", policy, kind]
            runs = [json.loads(subprocess.check_output(command)) for _ in range(REPEATS)]
            updates, seconds, cpu_s, peak = (median(run[name] for run in runs) for name in runs[0])
            print(f"| `{policy}` | {kind} | {updates:,.0f} | {seconds:.0f} | {cpu_s:.0f} | {peak:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
