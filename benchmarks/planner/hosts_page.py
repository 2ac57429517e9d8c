"""The page of servers on emulated hosts."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from hosts_predicted import Predicted, measured_machine, predicted
from kit.machine import described
from kit.sheet import Row
from kit.words import grid

HEAD = """\
# Servers on hosts with slow links, predicted and measured

    python benchmarks/planner/hosts.py            # needs root
    python benchmarks/planner/hosts.py --page

Asynchronous replicas that compute nothing, on [emulated hosts](../hosts/README.md): namespaces of one machine whose
links `tc` limits in both directions. `paceline.planner.servers`, by which `paceline plan` chooses `servers=`, predicts
from what is measured apart: what raw sockets get of such a link ({links}),
and what a Δ takes of the cores that all hosts share, on one host and on four without limits: {message} for each slice
to another host and back, and {byte} for each byte of it. A replica on the only server's host waits for no link, and
makes most of the Δs, as fast as the cores can: there bytes on links say more.

*Load* is the machine's load average before a run. It includes the benchmark's own processes of the run before; where
it is several times the {cores} cores others computed too, and less is measured than the machine can do.
"""

KEYS = ("mbit", "hosts", "workers", "servers", "parameters")
BEFORE = 14
"""Runs that had been measured when the formula was chosen among others: mean value analysis, and waits for the last."""

TITLES = (
    *("Mbit/s", "hosts", "replicas", "servers", "parameters", "Δs a second, predicted", "measured", "ratio"),
    *("MB/s on all links, predicted", "measured", "ratio", "load"),
)


class Pair(NamedTuple):
    """A predicted figure and the measured one."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error."""
        return abs(self.predicted / self.measured - 1)

    @property
    def texts(self) -> Sequence[str]:
        """Both, and their ratio."""
        return f"{self.predicted:.3g}", f"{self.measured:.3g}", f"{self.predicted / self.measured:.2f}"


class Errors(NamedTuple):
    """A run with its prediction."""

    updates: Pair
    sent: Pair

    @classmethod
    def of(cls, row: Row, found: Predicted) -> "Errors":
        """Beside what was measured."""
        return cls(*(Pair(each, float(row[name])) for name, each in found._asdict().items()))

    def line(self, row: Row) -> Sequence[object]:
        """A line of the table."""
        sent = Pair(*(each / 1e6 for each in self.sent))
        pairs = [text for pair in (self.updates, sent) for text in pair.texts]
        return *(row[name] for name in KEYS), *pairs, row["load"]


def page(rows: Sequence[Row]) -> str:
    """The whole text; ratios are predicted over measured."""
    machine = measured_machine(rows)
    limited = [row for row in rows if row["side"] == "paceline" and row["mbit"] != "0"]
    found = [(row, Errors.of(row, predicted(row, machine))) for row in sorted(limited, key=_order)]
    links = " and ".join(f"{rate / 1e6:.3g} MB/s of {mbit} Mbit/s" for mbit, rate in machine.link_bytes_per_s.items())
    byte, message = f"{machine.byte_s * 1e9:.2g} ns", f"{machine.message_s * 1e3:.2g} ms"
    head = HEAD.format(links=links, message=message, byte=byte, cores=rows[0]["cores"])
    loads = sorted(float(row["load"]) for row in limited)
    where = f"Load {loads[0]:.1f} to {loads[-1]:.1f}, median {median(loads):.1f}. Machine: {described(rows)}.\n"
    return "\n".join(
        [head, grid(TITLES, (errors.line(row) for row, errors in found)), *_summary(found, limited), where]
    )


def _summary(found: Sequence[tuple[Row, Errors]], limited: Sequence[Row]) -> Sequence[str]:
    """Lines with the median errors of all rows, and of some; the second are the rows as they were measured."""
    later = [id(row) for row in limited[BEFORE:]]
    kinds = {
        "all": found,
        f"measured after the formula was settled, which the first {BEFORE} runs had a part in": [
            each for each in found if id(each[0]) in later
        ],
        "5,000,000 parameters": [each for each in found if each[0]["parameters"] == "5000000"],
        "1,000,000 parameters": [each for each in found if each[0]["parameters"] == "1000000"],
        "22,000 parameters": [each for each in found if each[0]["parameters"] == "22000"],
        "several servers, 1,000,000 parameters or more": [
            each for each in found if each[0]["parameters"] != "22000" and each[0]["servers"] != "1"
        ],
    }
    lines = ["\n## How far off", "\nThe median of |predicted / measured - 1|, and the largest:\n"]
    for name, rows in kinds.items():
        if rows:
            updates, sent = ([getattr(errors, which).error for _, errors in rows] for which in ("updates", "sent"))
            lines.append(
                f"- {name}, {len(rows)} runs: Δs a second {median(updates):.0%}, {max(updates):.0%}; bytes on links "
                f"{median(sent):.0%}, {max(sent):.0%}"
            )
    return [*lines, ""]


def _order(row: Row) -> tuple[int, ...]:
    return tuple(int(row[name]) for name in KEYS)
