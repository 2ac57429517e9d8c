"""Plans with servers on the hosts of a Ray cluster: their pace under a policy, how many servers, and who is where.

The synchronous policy of ranks that all-reduce has no servers, and is another plan. Here each replica pushes its Δ to
every server and pulls A from there, under any policy, over the links that servers.py describes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from paceline import support
from paceline.aggregation import Asynchronous, Buffered, Synchronous, parse, text_of
from paceline.clock.cluster_file import Links
from paceline.clock.times import Delay
from paceline.core.errors import InputError
from paceline.core.formatting import seconds_text
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, Cost, Plan, Workload
from paceline.planner.cluster import CachedMessages, Cluster, Described, Messages
from paceline.planner.policies import arrivals, loose_policies, source, waiting
from paceline.planner.policy_pace import Pace, micro_steps
from paceline.planner.search.objective import Objectives
from paceline.planner.servers import HostShare, Resource, ServedReplicas, server_counts
from paceline.support import Case

# Relative time of a step that more servers have to gain: each is one more process whose end ends the run.
LEAST_GAIN = 0.01

# Beginnings of the policies that compete where no replica is delayed: they differ in what is on the links when.
UNDELAYED = ("asynchronous", "smooth-switch", "local-steps")


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers of a plan."""

    hosts: tuple[HostShare, ...]
    """Replicas and servers of each host; host 0 is the driver's."""
    state_bytes: float
    """Slice of A and of the optimizer's state that each server has."""
    busiest: Resource
    busy: float
    """Share of the time in which the busiest resource is occupied."""
    steps_s: Mapping[int, Seconds]
    """Number of servers -> time of a step, for the same arrangement and policy."""

    @property
    def count(self) -> int:
        """Number of servers."""
        return sum(len(share.servers) for share in self.hosts)

    def __str__(self) -> str:
        if len(self.hosts) == 1:
            return "one, as replicas on one host share its memory"
        kind, host = self.busiest
        where = "updates are" if kind == "servers" else f"the {kind} link of host {host} is"
        others = " and ".join(f"{seconds_text(s)} with {n}" for n, s in self.steps_s.items() if n != self.count)
        step = seconds_text(self.steps_s[self.count])
        return f"{self.count}, with which a step takes {step}, and {others}; {where} occupied most, {self.busy:.0%}"

    def json(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        hosts = [{"host": host, **share._asdict()} for host, share in enumerate(self.hosts)]
        busiest = {"resource": self.busiest[0], "host": self.busiest[1], "busy": self.busy}
        steps = {str(count): seconds for count, seconds in self.steps_s.items()}
        return {"hosts": hosts, "state_bytes": self.state_bytes, "busiest": busiest, "steps_s": steps}


# --------------------------------------------------------------------------------------------------------------- search


def refuse(cluster: Cluster) -> None:
    """Raise InputError where the time of an update on a server, or of its messages, is not known."""
    if _described(cluster.messages) is None:
        raise InputError("engine='ray' needs the links of hosts; write a cluster by name or file, or leave engine out")
    if cluster.device.kind != "cpu":
        raise InputError(
            "engine='ray' has servers that update A in the memory of hosts, but the cluster, of GPUs, says nothing of "
            'that; write a device with kind = "cpu", or leave engine out'
        )


def compete(cluster: Cluster, objectives: Objectives) -> bool:
    """Return whether plans with servers compete: where Ray is asked for, or policies compete on several hosts."""
    if objectives.engine == "ray":
        return True
    described = cluster.hosts > 1 and cluster.device.kind == "cpu" and _described(cluster.messages) is not None
    return described and objectives.engine is None and objectives.delay is not None


def most_workers(replicas: int, cluster: Cluster) -> int:
    """Return the workers of so many replicas for which hosts have devices; a replica is on one host.

    >>> from paceline.planner.cluster_file import read
    >>> [most_workers(replicas, read("4x8 A100-80GB")) for replicas in (1, 4, 5, 32, 33)]
    [8, 32, 20, 32, 0]
    """
    return replicas * (cluster.devices_per_host // -(-replicas // cluster.hosts))


def served_plans(
    plans: Sequence[Plan], workload: Workload, cluster: Cluster, objectives: Objectives
) -> Iterator[tuple[Plan, Pace]]:
    """Yield the best of these plans under each policy, with as many servers as make it fastest, and its pace.

    Args:
        plans: supported on Ray, of as many replicas each, for which hosts have devices.
        workload: that is trained.
        cluster: that it is trained on.
        objectives: of the search.
    """
    models = [ServedModel(plan, plan.cost, workload, cluster, objectives.delay) for plan in plans]
    small = objectives.objective == "memory"
    for model in sorted(models, key=lambda model: model.cost.peak.total if small else model.batch_s)[:1]:
        policies = loose_policies(model.plan)
        if objectives.delay is None:  # nobody is late, and those that don't wait for late replicas gain nothing
            policies = (policy for policy in policies if policy.startswith(UNDELAYED))
        for policy in ("synchronous", *policies):
            if candidate := model.candidate(policy, objectives):
                yield candidate


# ---------------------------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class ServedModel:
    """A plan of ranks that all-reduce, with servers instead.

    Args:
        plan: without servers, or with others.
        cost: of ranks that all-reduce, for the same arrangement.
        workload: that is trained.
        cluster: that it is trained on.
        delay: of replicas.
    """

    plan: Plan
    cost: Cost
    workload: Workload
    cluster: Cluster
    delay: Delay | None

    @cached_property
    def terms(self) -> Mapping[str, Seconds]:
        """Terms of a replica's own step: Δ is not summed over replicas, and servers update A."""
        numerics, a = self.workload.numerics, self.plan.arrangement
        largest = max(memory.gradients for memory in self.cost.memory) / numerics.gradient
        update_s = 2 * numerics.total * largest / self.cluster.device.memory_bytes_per_s
        added_s = max(0.0, self.cost.terms["optimizer"] - update_s) if a.micro_batches > 1 else 0.0
        return {**self.cost.terms, "replicas": 0.0, "optimizer": added_s}

    @property
    def batch_s(self) -> Seconds:
        """Time of a replica's own step."""
        return sum(self.terms.values())

    def replicas(self, servers: int) -> ServedReplicas:
        """Return the replicas with so many servers; an update reads and writes each byte once."""
        size, numerics, cluster = parameters(self.workload), self.workload.numerics, self.cluster
        moved = 2 * size * (numerics.parameter + numerics.optimizer), 2 * size * numerics.gradient
        apply_s, gradient_s = (each / cluster.device.memory_bytes_per_s for each in moved)
        sizes = cluster.hosts, self.plan.arrangement.replicas, servers, size * numerics.gradient
        return ServedReplicas(*sizes, host_links(cluster), self.batch_s, apply_s, gradient_s, self.delay)

    def candidate(self, policy: str, objectives: Objectives) -> tuple[Plan, Pace] | None:
        """Return the plan with the fewest servers of those that make it fastest, or nearly so.

        None: Ray does not support it, so many replicas can't have the policy, or hosts lack the memory.
        """
        plan, count = self.plan, self.plan.arrangement.replicas
        assert plan.strategy is not None, "it is supported on Ray"
        strategy = replace(plan.strategy, aggregation=parse(policy))
        if support.first_row(Case.of(strategy, "ray")) is not None:
            return None
        try:
            paces = {n: served_pace(policy, self.replicas(n)) for n in server_counts(self.cluster.hosts)}
        except InputError:
            return None
        fastest_s = min(pace.update_s for pace in paces.values())
        best = next(n for n, pace in paces.items() if pace.update_s <= fastest_s * (1 + LEAST_GAIN))
        servers = self._servers(policy, best, {n: pace.step_s(count) for n, pace in paces.items()})
        if not self._fits(servers, objectives.max_bytes(self.cluster)):
            return None
        cost = self._cost(policy, servers)
        times = cost.step_s / plan.cost.step_s
        utilisation = None if plan.utilisation is None else plan.utilisation / times
        rates = plan.low_s * times, plan.high_s * times, plan.samples_per_s / times, utilisation
        provenance = {**plan.provenance, "waiting": source(paces[best], objectives), "servers": str(servers)}
        strategy = replace(strategy, servers=best)
        return Plan(plan.arrangement, cost, *rates, strategy, plan.simulated, provenance, "", servers), paces[best]

    def _servers(self, policy: str, count: int, steps_s: Mapping[int, Seconds]) -> Servers:
        group, numerics, parsed = self.replicas(count), self.workload.numerics, parse(policy)
        alike = 1 / (micro_steps(parsed) * steps_s[count])
        rates = group.rates if isinstance(parsed, Asynchronous) else [alike] * len(group.classes)
        state_bytes = parameters(self.workload) * (numerics.parameter + numerics.optimizer) / count
        return Servers(group.placed, state_bytes, *group.busiest(rates), steps_s)

    def _fits(self, servers: Servers, max_bytes: float) -> bool:
        """Return whether the memory of each host's devices has room for its replicas and servers."""
        own_bytes = self.plan.arrangement.replica_workers * self.cost.peak.total
        needed = (len(h.replicas) * own_bytes + len(h.servers) * servers.state_bytes for h in servers.hosts)
        return max(needed) <= self.cluster.devices_per_host * max_bytes

    def _cost(self, policy: str, servers: Servers) -> Cost:
        """Return the cost: ``replicas`` is what links and updates add to a step, ``waiting`` what delays do."""
        replicas, step_s = self.plan.arrangement.replicas, servers.steps_s[servers.count]
        delayed_s = min(step_s, paced(policy, replicas, self.batch_s, self.delay).step_s(replicas))
        waiting_s = self.terms["waiting"] + delayed_s - self.batch_s
        sent = self.replicas(servers.count).sent_bytes / micro_steps(parse(policy))
        return replace(
            self.cost,
            terms={**self.terms, "replicas": step_s - delayed_s, "waiting": waiting_s},
            memory=tuple(replace(each, optimizer=0.0) for each in self.cost.memory),  # servers have it
            sent_bytes={**self.cost.sent_bytes, "replicas": sent},
        )


def served_step_s(plan: Plan, cost: Cost, workload: Workload, cluster: Cluster, delay: Delay | None) -> Seconds:
    """Return the time of a step of a plan with servers, where ranks that all-reduce would have this cost."""
    assert plan.strategy is not None
    assert plan.servers is not None
    group = ServedModel(plan, cost, workload, cluster, delay).replicas(plan.servers.count)
    return served_pace(text_of(plan.strategy.aggregation), group).step_s(group.replicas)


def served_pace(policy: str, group: ServedReplicas) -> Pace:
    """Return the pace of replicas with servers: the pace without links, and messages and updates in addition.

    An update that all replicas wait for is later by the whole time of their messages, others by the share of replicas
    whose Δs it has. That is exact for synchronous and stale-synchronous policies. Buffered ones, which hold replicas
    until the K-th has come, are an eighth too fast where messages take as long as batches.

    Args:
        policy: as written for a strategy.
        group: of replicas.

    Raises:
        InputError: a text that can't be read, or a policy that so many replicas can't have.

    >>> links = Links(inside_bytes_per_s=1e9, between_bytes_per_s=1e7)
    >>> [round(served_pace("synchronous", ServedReplicas(4, 4, n, 4e6, links, 0.1)).update_s, 2) for n in (1, 2, 4)]
    [2.5, 1.3, 0.7]
    """
    resolved = parse(policy).resolved(learning_rate=None, replicas=group.replicas)
    pace = paced(policy, group.replicas, group.batch_s, group.delay)
    if isinstance(resolved, Asynchronous):
        return replace(pace, update_s=1 / group.rate if group.rate else inf)
    match resolved:
        case Synchronous(backups=backups):
            begun, share = group.replicas - backups, 1.0
        case Buffered(k=int() as k, cancel=cancel):
            begun, share = k, 1.0 if cancel else k / group.replicas
        case _:
            begun, share = group.replicas, pace.batches / micro_steps(resolved) / group.replicas
    return replace(pace, update_s=pace.update_s + share * group.transfer_s(resolved, begun))


def paced(policy: str, replicas: int, batch_s: Seconds, delay: Delay | None) -> Pace:
    """Return the pace of replicas without links."""
    text = None if delay is None else str(delay)
    return waiting(policy, replicas, batch_s, text, arrivals=arrivals(policy, replicas))


def parameters(workload: Workload) -> int:
    """Return the parameters of a model; layers that are tied count once."""
    layers = workload.layers(Arrangement())
    tied = {layer.tied: layer.parameters for layer in layers if layer.tied}
    return sum(layer.parameters for layer in layers if not layer.tied) + sum(tied.values())


def host_links(cluster: Cluster) -> Links:
    """Return the links of a host, which all of its devices share, with the bandwidth that messages get of them."""
    described = _described(cluster.messages)
    assert described is not None, "a cluster in words is described"
    links, efficiency = described.links, described.efficiency
    between = links.between_bytes_per_s * cluster.devices_per_host * efficiency
    return replace(links, inside_bytes_per_s=links.inside_bytes_per_s * efficiency, between_bytes_per_s=between)


def _described(messages: Messages) -> Described | None:
    if isinstance(messages, CachedMessages):
        messages = messages.messages
    return messages if isinstance(messages, Described) else None
