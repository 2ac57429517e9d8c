"""Predicted Δs and bytes of asynchronous replicas on emulated hosts, from what links and machine do by themselves.

The rate of a link is that of raw sockets. All emulated hosts share the machine's cores, so each Δ takes some of their
time: a + b · messages to other hosts + c · bytes to other hosts, fitted to runs whose links have no limit. That time is
a resource of all replicas, in place of the servers' own.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from kit.sheet import Row

from paceline.clock.cluster_file import Links
from paceline.planner.servers import SERVERS, Phase, ReplicaClass, ServedReplicas, mean_value_rates

INSIDE_BYTES_PER_S = 1e12
"""Messages on one host are copies by the same cores, whose time is in the machine's."""
LATENCY_S = 1e-6
"""Likewise."""
ELEMENT_BYTES = 4


class Predicted(NamedTuple):
    """Rates of one run."""

    updates_per_s: float
    sent_bytes_per_s: float


class Machine(NamedTuple):
    """What is measured apart from the runs that are predicted."""

    link_bytes_per_s: Mapping[str, float]
    """Mbit/s of the limit -> bytes that raw sockets send in a second."""
    alone_s: Mapping[str, float]
    """Parameters -> time of a Δ on one host."""
    message_s: float
    """Time of a slice of a push and of a pull to another host, beside its bytes."""
    byte_s: float


def measured_machine(rows: Sequence[Row]) -> Machine:
    """Return what raw sockets, one host and links without limits say; least squares of relative errors."""
    links = {
        row["mbit"]: float(row["sent_bytes_per_s"]) / int(row["hosts"]) for row in rows if row["side"] == "sockets"
    }
    unlimited = [row for row in rows if row["side"] == "paceline" and row["mbit"] == "0"]
    alone_s = {
        size: fmean(
            1 / float(row["updates_per_s"]) for row in unlimited if (row["hosts"], row["parameters"]) == ("1", size)
        )
        for size in dict.fromkeys(row["parameters"] for row in unlimited)
    }
    factors, rest = list[tuple[float, float]](), list[float]()
    for row in (row for row in unlimited if row["hosts"] != "1"):
        delta_s = 1 / float(row["updates_per_s"])
        far = int(row["servers"]) - 1
        sent_bytes = far / int(row["servers"]) * ELEMENT_BYTES * int(row["parameters"])
        factors.append((far / delta_s, sent_bytes / delta_s))
        rest.append(1 - alone_s[row["parameters"]] / delta_s)
    message_s, byte_s = np.linalg.lstsq(np.array(factors), np.array(rest), rcond=None)[0]
    return Machine(links, alone_s, max(0.0, float(message_s)), max(0.0, float(byte_s)))


def predicted(row: Row, machine: Machine) -> Predicted:
    """Return the rates of a run."""
    link, size = machine.link_bytes_per_s[row["mbit"]], ELEMENT_BYTES * int(row["parameters"])
    sizes = [int(row[name]) for name in ("hosts", "workers", "servers")]
    links = Links(INSIDE_BYTES_PER_S, link, LATENCY_S, LATENCY_S)
    served = ServedReplicas(*sizes, size, links, batch_s=0.0)
    classes = [_with_machine(each, link, machine, machine.alone_s[row["parameters"]]) for each in served.classes]
    rates = mean_value_rates(classes)
    updates_per_s = sum(each.number * rate for each, rate in zip(classes, rates, strict=True))
    sent_s = (_sent_s(each) * each.number * rate for each, rate in zip(classes, rates, strict=True))
    return Predicted(updates_per_s, sum(sent_s) * link)


def _with_machine(replicas: ReplicaClass, link: float, machine: Machine, alone_s: float) -> ReplicaClass:
    push, _, pull = replicas.phases
    messages = sum(kind == "incoming" for kind, _ in push.demands)
    pushed_bytes = max(push.demands.values(), default=0.0) * link
    taken_s = alone_s + messages * machine.message_s + pushed_bytes * machine.byte_s
    return replicas._replace(phases=(push, Phase({SERVERS: taken_s}), pull))


def _sent_s(replicas: ReplicaClass) -> float:
    """Return how long outgoing links are occupied for a Δ."""
    return sum(seconds for (kind, _), seconds in replicas.demands.items() if kind == "outgoing")
