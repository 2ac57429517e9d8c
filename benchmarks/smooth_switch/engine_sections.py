"""The page's parts about real workers: what Ray's and the local server take, and whether real workers agree."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import engines
import server_time
from figures import SAID
from measured import machine
from sections import SCRIPT, Cells, grid
from server_time import SIZES, WARM_UP_S, WINDOW_S, WORKERS, fit, medians, points_of, shortest
from sheets import read

from paceline.clock.distributions import show

ALGORITHMS = ("asynchronous", "smooth_switch")
"""As the columns of the sheet call them."""


def servers(folder: Path) -> str:
    """The server's time of an update, an engine a row."""
    head = "## The server's time\n\n"
    points = points_of(folder)
    if not points:
        return f"{head}It has not been measured: `{SCRIPT} --fit-server`."
    rows: list[Cells] = []
    for name in dict.fromkeys(point.engine for point in points):
        rows += [_server(f"{name}, medians", medians(points, name)), _server("shortest", shortest(points, name))]
    titles = ("engine", "a, ms", "c, ms", "furthest point", *(f"K = {k}" for k in SIZES))
    repeats = 1 + max(point.repeat for point in points)
    shares = [point.elsewhere for point in points]
    words = (
        f"How long an update of K gradients occupies the server: a + c·K. {WORKERS} workers on random data, none of "
        "them delayed, keep it busy under `buffered:k=K,combine=sum`; the period of updates is taken over "
        f"{WINDOW_S:g} s after {WARM_UP_S:g} s to warm up, {repeats} times for each K in alternating order. Below are "
        "periods in ms and the line through them (least squares of relative distances); the line through the medians "
        f"is what is used. Measured on: {machine('ray')}. **Workers and server share the cores of this host**, so a "
        "period holds the workers' processor time too; on a host with a core for each it would be shorter. Other "
        f"programs ran beside it: those of low priority alone had {100 * min(shares):.0f} to "
        f"{100 * max(shares):.0f} % of the cores. Where the shortest periods lie far below the medians, the medians "
        "say more of those programs than of the server. CSV: "
        f"[server]({server_time.SHEET}), made by `{SCRIPT} --fit-server`."
    )
    return f"{head}{words}\n\n{grid(titles, rows)}"


def _server(engine: str, points: Mapping[int, float]) -> Cells:
    server = fit(points)
    line = (f"{1000 * server.apply_s:.3f}", f"{1000 * server.gradient_s:.3f}", f"{100 * server.residual(points):.0f} %")
    return (engine, *line, *(f"{1000 * points[k]:.2f}" if k in points else "" for k in SIZES))


def agreement(folder: Path) -> str:
    """Real workers beside virtual time, a difference a row."""
    head = "## Real workers and virtual time\n\n"
    path = folder / engines.SHEET
    if not path.exists():
        return f"{head}They have not been compared: `{SCRIPT} --engines`."
    rows = read(path)
    counts = {word: sum(row["verdict"] == word for row in rows) for word in ("agree", "disagree", "unclear")}
    return (
        f"{head}{_how(rows)}\n\n"
        f"**{counts['agree']} agree in sign, {counts['disagree']} disagree, {counts['unclear']} are unclear** (an "
        f"interval contains 0). CSV: [engines]({engines.SHEET}).\n\n"
        + grid(("engine", "combine", "", "real workers", "virtual time", "signs"), [_difference(row) for row in rows])
        + "\n\nGradients made, mean of a run, and what was measured, in ms:\n\n"
        + grid(
            ("engine", "combine", *_COUNTED, "compute", "transfer", "server"),
            [_pace(row) for row in rows if row["metric"] == rows[0]["metric"]],
        )
    )


_COUNTED = tuple(
    f"{name}, {where}" for name in ("asynchronous", "Smooth Switch") for where in ("real workers", "virtual time")
)


def _how(rows: Sequence[Mapping[str, str]]) -> str:
    first = rows[0]
    return (
        f"Smooth Switch 5/lr minus asynchronous, {first['rounds']} rounds of {float(first['seconds']):g} s with "
        f"{WORKERS} workers, half of them delayed by N(0, 0.25); mean ± half of the 95 % interval. The real runs "
        "record spans. The virtual ones have the same seeds and delays, and both algorithms have the times of their "
        "round's asynchronous run, in which no worker waits for another: compute is the mean forward and backward "
        "while workers shared the cores, without delay; the server's time is the line above, all of it shorter where "
        "more gradients came in a second than it allows; transfer is half of what is left of a step beside compute, "
        "delay and the time at the server (update and queue, by Pollaczek and Khinchine's formula; where the server is "
        "always busy, all that is left is queue but for push and pull). So where it is always busy, virtual time has "
        "the asynchronous run's pace from the real one, and Smooth Switch's from that.\n\n"
        f"`{SCRIPT} --engines --engines-rounds {first['rounds']} --engines-seconds {float(first['seconds']):g}` makes "
        "this table anew."
    )


def _difference(row: Mapping[str, str]) -> Cells:
    shown = (f"{float(row[name]):+.3f} ± {float(row[f'{name}_half_width']):.3f}" for name in ("real", "virtual"))
    return (row["engine"], f"`{row['combine']}`", SAID[row["metric"]], *shown, row["verdict"])


def _pace(row: Mapping[str, str]) -> Cells:
    counts = (f"{int(row[f'{name}_gradients_{where}']):,}" for name in ALGORITHMS for where in ("real", "virtual"))
    server = f"{_ms(row['apply_s'])} + {_ms(row['gradient_s'])} K"
    return (row["engine"], f"`{row['combine']}`", *counts, _ms(row["compute_s"]), _ms(row["transfer_s"]), server)


def _ms(seconds: str) -> str:
    return show(float(f"{1000 * float(seconds):.3g}"))
