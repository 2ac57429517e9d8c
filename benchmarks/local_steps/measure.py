"""Replicas that exchange after many steps of their own: what it costs in loss, and gains on slow links.

    python benchmarks/local_steps/measure.py --data DIR        # the loss, in virtual time
    python benchmarks/local_steps/measure.py --links           # steps over links of some Mbit/s (needs root)
    python benchmarks/local_steps/measure.py --page

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.hosts import address, hosts, why_not
from kit.machine import described, machine
from kit.sheet import Row, Sheet
from kit.words import grid

from paceline import train
from paceline.datasets import load_program

HERE = Path(__file__).parent
REPLICAS, STEPS, SEEDS = 4, 2000, (0, 1, 2)

POLICIES = {
    "synchronous": "synchronous",
    "local SGD": "local-steps:period=50",
    "DiLoCo": "local-steps:period=50,outer=nesterov",
    "DiLoCo, 5 fragments": "local-steps:period=50,outer=nesterov,fragments=5",
    "DiLoCo, 5 fragments, overlap": "local-steps:period=50,outer=nesterov,fragments=5,overlap=4",
}
RANKS, MBITS, ROUNDS, LINK_STEPS = 2, (100, 1000), 3, 100
OWN = f"replicas={RANKS} threads=1"
"""Of the hosts all are this one, whose cores the ranks share."""


def losses(data: Path, sheet: Sheet) -> None:
    """Train a character transformer under each policy, with the same data in the same order."""
    for seed in SEEDS:
        for name, policy in POLICIES.items():
            if sheet.find(name, seed) is not None:
                continue
            program = load_program("shakespeare", data=data, seed=seed)
            run = train(
                program,
                f"replicas={REPLICAS} aggregation={policy}",
                engine="virtual",
                steps=STEPS,
                evaluate_every=STEPS // 10,
                progress=False,
            )
            row = {"side": name, "seed": seed, "test_loss": run.history[-1].test_loss, "steps": STEPS}
            sheet.put(row | machine())
            print(name, seed, run.history[-1].test_loss, flush=True)


def links(sheet: Sheet) -> None:
    """Measure a step of each side over slow links, by turns."""
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"--links: {reason}")
    sides = ["ddp", *(f"{OWN} aggregation={policy}" for policy in POLICIES.values())]
    for mbit in MBITS:
        for number in range(ROUNDS):
            for side in sides[:: -1 if number % 2 else 1]:
                if sheet.find(side, mbit, number) is None:
                    sheet.put({"side": side, "mbit": mbit, "round": number} | over(side, mbit) | machine())
                    print(side, mbit, number, sheet.find(side, mbit, number), flush=True)


def over(side: str, mbit: float, steps: int = LINK_STEPS) -> dict[str, float]:
    """Return the figures of a side, of its slowest rank."""
    with hosts(RANKS, mbit) as names:
        ranks = list[subprocess.Popen[str]]()
        for rank, name in enumerate(names):
            about = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
            about |= {"MASTER_ADDR": address(0), "MASTER_PORT": 29400, "GLOO_SOCKET_IFNAME": "eth0"}
            words = ["ip", "netns", "exec", name, "env", *(f"{key}={value}" for key, value in about.items())]
            words += [sys.executable, str(HERE / "rank.py"), side, str(steps)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment))
        told = [json.loads(process.communicate(timeout=600)[0]) for process in ranks]
    return {name: max(each[name] for each in told) for name in told[0]}


def page(loss: Sheet, link: Sheet, folder: Path) -> None:
    """Write README.md from the rows."""
    names = {f"{OWN} aggregation={policy}": name for name, policy in POLICIES.items()} | {"ddp": "DDP"}
    tables = [loss_table(loss.rows)]
    for mbit in MBITS:
        at = [row for row in link.rows if row["mbit"] == str(mbit)]
        base = median([float(row["step_s"]) for row in at if names[row["side"]] == "synchronous"] or [float("nan")])
        rows = []
        for side, name in names.items():
            own = [row for row in at if row["side"] == side]
            if own:
                seconds, sent = (median(float(row[key]) for row in own) for key in ("step_s", "payload_bytes"))
                rows.append((name, f"{1e3 * seconds:.1f}", f"{base / seconds:.1f}", f"{sent / 2**20:.2f}", len(own)))
        if rows:
            head = ("", "ms a step", "times as fast as synchronous", "MiB a step, all ranks", "rounds")
            tables.append(f"**{mbit} Mbit/s**\n\n{grid(head, rows)}")
    where = f"Machine: {described([*loss.rows, *link.rows])}."
    text = "\n\n".join([HEAD, tables[0], *([LINKS, *tables[1:]] if tables[1:] else []), where])
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")


def loss_table(rows: Sequence[Row]) -> str:
    """Return medians over the seeds: of the loss, and of its distance from that of synchronous with the same data."""
    plain = {row["seed"]: float(row["test_loss"]) for row in rows if row["side"] == "synchronous"}
    lines = []
    for name, policy in POLICIES.items():
        found = {row["seed"]: float(row["test_loss"]) for row in rows if row["side"] == name and row["seed"] in plain}
        if found:
            beside = [loss - plain[seed] for seed, loss in found.items()]
            cells = (
                f"{median(found.values()):.4f}",
                f"{median(beside):+.4f}",
                f"{min(beside):+.4f} to {max(beside):+.4f}",
            )
            lines.append((name, f"`{policy}`", *cells, len(found)))
    return grid(("", "policy", "test loss, median", "beside synchronous, median", "of all seeds", "seeds"), lines)


HEAD = f"""# Local steps

What DiLoCo claims (arXiv 2311.08105), and Streaming DiLoCo (arXiv 2501.18512), in small: replicas that exchange every
50 steps train as well as those that exchange each step, and send a fiftieth.

    python benchmarks/local_steps/measure.py --data DIR    # DIR has tinyshakespeare's input.txt
    python benchmarks/local_steps/measure.py --links       # needs root
    python benchmarks/local_steps/measure.py --page

## Loss

The built-in `shakespeare` transformer under AdamW, {REPLICAS} replicas with batch 32, {STEPS} steps in virtual time;
each seed has the same data in the same order under all policies. The outer optimizer is DiLoCo's: Nesterov's momentum
of 0.9, learning rate 0.7."""

LINKS = f"""## Slow links

{RANKS} ranks in network namespaces, Gloo between them, links limited by `tc tbf`; a perceptron of a million parameters
(4 MB) under AdamW, batch 64 per replica, one thread a rank; mean time of the second half of {LINK_STEPS} steps on the
slower rank, median of the rounds, by turns. `overlap=4`: four steps are made while a fifth of A is summed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not there yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of input.txt")
    parser.add_argument("--links", action="store_true", help="measure steps over slow links")
    parser.add_argument("--page", action="store_true", help="write README.md alone")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and README.md")
    said = parser.parse_args(arguments)
    loss = Sheet(said.out / "results" / "loss.csv", ("side", "seed"))
    link = Sheet(said.out / "results" / "links.csv", ("side", "mbit", "round"))
    if said.data is not None:
        losses(said.data, loss)
    if said.links:
        links(link)
    page(loss, link, said.out)


if __name__ == "__main__":
    main()
