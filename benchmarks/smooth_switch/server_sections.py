"""The page's part about A in slices: tables with one server and with several, on Ray."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan
from pathlib import Path

import ray_servers
from cells import METRICS, Cell
from figures import SAID, title
from protocol import ALGORITHMS, TABLES
from ray_servers import Gains, Kept, Load, by_servers
from sections import SCRIPT, Cells, grid
from sheets import read
from study import COMPARED


def server_counts(folder: Path) -> str:
    """Tables by number of servers; nothing where they have not been run."""
    path = folder / "ray" / ray_servers.SHEET
    if not path.exists():
        return ""
    rows = read(path)
    tables = by_servers(rows)
    parts = [
        "## One server of A, and several",
        _how(rows),
        *(part for number, counts in tables.items() for part in _gains(int(number), counts)),
        _what_was_busy(rows),
        grid(_TITLES, [row for number, counts in tables.items() for row in _loads(number, counts)]),
    ]
    return "\n\n".join(parts)


def _how(rows: Sequence[Kept]) -> str:
    first = rows[0]
    counts = sorted({int(row["servers"]) for row in rows})
    options = [f"--engine ray {' '.join(f'--servers {count}' for count in counts)}"]
    options += [f"--table {number}" for number in by_servers(rows)]
    options += [f"--rounds {first['rounds']} --seconds {first['seconds']} --points {first['points']}"]
    limit = float(first["other_cores_limit"])
    options += [f"--other-cores {limit:g}"] if isfinite(limit) else []
    again = (
        f" Runs of these two in which other programs had more than {limit:g} cores were made again, once, at another "
        "time, and so under another load, than those that they are compared with."
        if isfinite(limit)
        else ""
    )
    return (
        f"Tables on Ray with `servers=n`, n slices of A with a server each: {first['rounds']} rounds of "
        f"{first['seconds']} s with {first['workers']} workers, evaluated {first['points']} times after the start; "
        f"the tables above have {Cell.seconds:g} s. Runs are made one at a time, the algorithms in turn and the "
        "numbers of servers in turn, every second round backwards. Smooth Switch minus asynchronous, mean ± half of "
        "the 95 % interval over rounds; the last column is the mean of a round's configurations, which share "
        f"asynchronous runs.{again} CSV: [servers](ray/{ray_servers.SHEET}), made by\n\n"
        f"    {SCRIPT} {' '.join(options)} --data DATA"
    )


def _gains(number: int, counts: Mapping[int, Sequence[Kept]]) -> Iterator[str]:
    """A table's heading, and its differences, for each metric by number of servers."""
    yield f"### Table {number}: {title(TABLES[number])}"
    some = next(iter(counts.values()))
    labels = list(dict.fromkeys(row["label"] for row in some))
    rows: list[Cells] = []
    for metric in METRICS:
        gains = {count: Gains.of(of_count, metric) for count, of_count in counts.items()}
        rows += [(SAID[metric], str(count), *_shown(found)) for count, found in gains.items()]
        if len(gains) > 1:
            few, many = min(gains), max(gains)
            rows.append((SAID[metric], f"{many} less {few}", *_shown(gains[many].minus(gains[few]))))
    yield grid(("", "servers", *labels, "together"), rows)


def _shown(gains: Gains) -> Iterator[str]:
    for mean, half_width in gains.columns():
        yield f"{mean:+.3f}" + ("" if isnan(half_width) else f" ± {half_width:.3f}")


_TITLES = (
    *("table", "servers", "algorithm", "test accuracy", "Δs a second", "updates a second", "K at the end"),
    *("ran", "waited for a core", "servers, cores", "workers, cores", "others, cores", "server time of a Δ, ms"),
)


def _what_was_busy(rows: Sequence[Kept]) -> str:
    loads = [float(row["load"]) for row in rows if row["load"]]
    cores = next((row["cores"] for row in rows if row["cores"]), "an unknown number of")
    spread = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "not measured"
    others = [float(row["other_cores"]) for row in rows if row["other_cores"] and row["algorithm"] in COMPARED]
    taken = f"{min(others):.2f} to {max(others):.2f}" if others else "an unknown number of"
    return (
        f"Servers and workers share the {cores} cores of this host, beside other programs; load average before a run: "
        f"{spread}, which holds the run before it; in a run of the two that are compared other programs had {taken} "
        "cores. Means over the runs, from `/proc`: fractions of the time in which "
        "the busiest thread of a server ran, and was ready but waited for a core; cores that all servers, all workers, "
        "and other programs had (Ray's own processes among them; the rest is evaluation and idle); and the processor "
        "time that all servers together spend on a Δ. A server is the bottleneck where the first two come to 100 %; "
        "the second is the processor's doing."
    )


def _loads(number: str, counts: Mapping[int, Sequence[Kept]]) -> Iterator[Cells]:
    for count, rows in counts.items():
        for algorithm in ALGORITHMS:
            load = Load.of([row for row in rows if row["algorithm"] == algorithm])
            used = load.usage
            yield (
                *(number, str(count), algorithm, f"{load.accuracy:.2f}"),
                *(f"{load.gradients:.0f}", f"{load.updates:.0f}", f"{load.threshold:.1f}"),
                *(f"{100 * used[name]:.0f} %" for name in ("server_running", "server_ready")),
                *(f"{used[name]:.2f}" for name in ("server_cores", "replica_cores", "other_cores")),
                f"{1000 * load.server_s:.2f}",
            )
