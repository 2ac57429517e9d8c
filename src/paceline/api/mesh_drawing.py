"""A mesh on its hosts: which rank is where, and which ranks communicate how often."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from paceline.aggregation import Synchronous
from paceline.core.errors import InputError
from paceline.core.formatting import aligned
from paceline.engine.scaling import next_hosts
from paceline.strategy import Strategy

BY_RANK = "shards of a stage stand in a row, then the stages of a replica, then replicas; hosts take them in that order"
BY_REPLICA = "all workers of a replica are on one host: the one that has the fewest replicas for its cores"

# Number of groups of a kind that are written out.
GROUPS_SHOWN = 8

# Kind of group, sign between its ranks, description, and how often its ranks communicate.
_KINDS = (
    ("shards", "-", "shards of a stage", "several times in each layer"),
    ("stages", ">", "from stage to stage", "each micro-batch, there and back"),
    ("copies", "-", "copies of a stage", "once a step"),
    ("peers", "-", "peers of a part", "once a step"),
)


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate with each other."""

    kind: str
    """``shards``, ``stages``, ``copies`` or ``peers``."""
    name: str
    """Position in the mesh: ``replica 0, stage 1``."""
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    """Hosts of its ranks, ascending."""


@dataclass(frozen=True)
class MeshDrawing:
    """A mesh on its hosts."""

    strategy: Strategy
    hosts: tuple[Sequence[int], ...]
    """Ranks of each host."""
    groups: tuple[RankGroup, ...]
    whole_replicas: bool = False
    """Whether all workers of a replica are on one host, and A on that of the main process: on Ray."""

    def host(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)

    @property
    def warnings(self) -> list[str]:
        """One line for each stage whose shards are on several hosts."""
        lines, smallest = [], min(map(len, self.hosts))
        for group in self.groups:
            if group.kind != "shards" or len(group.hosts) == 1:
                continue
            # The largest number of ranks per host with which no stage is cut by the border between two hosts.
            ranks, fitting = "-".join(map(str, group.ranks)), smallest // len(group.ranks) * len(group.ranks)
            instead = f"start {fitting} ranks on each host" if fitting else f"write shards={smallest} or fewer"
            lines.append(
                f"warning: the shards of {group.name} (ranks {ranks}) are on {_hosts(group.hosts)}: every operator "
                f"that is divided waits for the network between them; {instead}"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        mesh, ranks = self.strategy.mesh, list[dict[str, int]]()
        for rank in range(self.strategy.workers):
            place = mesh.coordinate(rank)
            copy, shard = mesh.stage_replica(place).copy, mesh.shard(place)
            position = {"replica": place.replica, "stage": place.stage, "copy": copy, "shard": shard}
            ranks.append({"rank": rank, "host": self.host(rank), **position})
        return {
            "ranks": ranks,
            "hosts": [list(host) for host in self.hosts],
            "groups": [{"kind": g.kind, "name": g.name, "ranks": g.ranks, "hosts": g.hosts} for g in self.groups],
            "warnings": self.warnings,
        }

    def __str__(self) -> str:
        s = self.strategy
        ranks = f"{s.workers} rank{'s' if s.workers != 1 else ''}"
        hosts = f"{len(self.hosts)} host{'s' if len(self.hosts) != 1 else ''}"
        border = "; | is between two hosts" if len(self.hosts) > 1 and not self.whole_replicas else ""
        turns = "; + is between workers that take turns at a stage" if s.replicated else ""
        head = f"{_sizes_text(s)} = {ranks} on {hosts}{border}{turns}"
        placement = f"placement: {BY_REPLICA if self.whole_replicas else BY_RANK}"
        blocks = ([head], self._grid(), self._communication(), [placement], self.warnings)
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def _grid(self) -> list[str]:
        """Return a row for each stage, with the ranks of each replica."""
        mesh, width = self.strategy.mesh, len(str(self.strategy.workers - 1))
        rows = [["", *(f"replica {replica}" for replica in range(mesh.replicas))]]
        if len(self.hosts) > 1:
            replica_hosts = (sorted(set(map(self.host, mesh.replica_ranks(r)))) for r in range(mesh.replicas))
            rows.append(["", *map(_hosts, replica_hosts)])
        for stage in range(len(mesh.stage_workers)):
            row = [f"stage {stage}"]
            for replica in range(mesh.replicas):
                copies = _stage_ranks(self.strategy, replica, stage)
                later_copies = [ranks[0] for ranks in copies[1:]]
                ranks = [rank for copy in copies for rank in copy]
                text = f"{ranks[0]:{width}}"
                for before, rank in pairwise(ranks):
                    marks = ("+" if rank in later_copies else "", "|" if self.host(before) != self.host(rank) else "")
                    text += " ".join(["", *filter(None, marks), f"{rank:{width}}"])
                row.append(text)
            rows.append(row)
        return aligned(rows)

    def _communication(self) -> list[str]:
        """Return a line for each kind of group: how often its ranks communicate, and across how many hosts."""
        rows = []
        for kind, sign, description, frequency in _KINDS:
            groups = [group for group in self.groups if group.kind == kind]
            if groups:
                apart = sum(len(group.hosts) > 1 for group in groups)
                texts = [sign.join(map(str, group.ranks)) for group in groups]
                shown = " ".join(texts if len(texts) <= GROUPS_SHOWN else [*texts[:GROUPS_SHOWN], "…"])
                between = f"{apart} of {len(groups)} between hosts" if apart else "each inside a host"
                rows.append([description, frequency, shown, between])
        synchronous = isinstance(self.strategy.aggregation, Synchronous)
        frequency = "once a step" if synchronous else "when its policy lets it"
        if self.whole_replicas:
            rows.append(["each replica and A", frequency, "", "in shared memory on the server's host, else over TCP"])
        elif not synchronous and self.strategy.replicas > 1:
            rows.append(["each replica and A", frequency, "", "in shared memory"])
        return aligned(rows)


def draw_mesh(strategy: Strategy | str, hosts: int | Sequence[int] | None = None, engine: str = "local") -> MeshDrawing:
    """Return the drawing of a mesh as a value; args and errors are those of :func:`paceline.show_mesh`."""
    s, whole_replicas = Strategy.coerce(strategy), engine.partition(":")[0] == "ray"
    host_ranks = _ranks_by_replica(s, hosts) if whole_replicas else _ranks_in_a_row(s, hosts)
    host_of = {rank: number for number, ranks in enumerate(host_ranks) for rank in ranks}
    # In the order in which kinds are printed; within a kind by replica and stage.
    kinds = [kind for kind, *_ in _KINDS]
    groups = [
        RankGroup(*group, tuple(sorted({host_of[rank] for rank in group[-1]})))
        for group in sorted(_groups(s), key=lambda group: kinds.index(group[0]))
        if not (whole_replicas and group[0] == "peers")  # each replica sends its Δ to the server
    ]
    return MeshDrawing(s, host_ranks, tuple(groups), whole_replicas)


def _ranks_by_replica(s: Strategy, hosts: int | Sequence[int] | None) -> tuple[Sequence[int], ...]:
    """Return the ranks of each host where each replica goes to one that has enough cores, or to several."""
    enough = s.mesh.per_replica
    cores = [enough] if hosts is None else [enough] * hosts if isinstance(hosts, int) else list(hosts)
    if not cores or min(cores) < 1:
        raise InputError(f"hosts={hosts} are none, or one has no core; write hosts=1, or the cores of each, hosts=[4]")
    placed = [list[int]() for _ in cores]
    for replica in range(s.replicas):
        counts = dict(enumerate(map(len, placed)))
        found = next_hosts(enough, counts, dict(enumerate(cores)))
        for rank, host in zip(s.mesh.replica_ranks(replica), found, strict=True):
            placed[host].append(rank)
    return tuple(placed)


def _ranks_in_a_row(s: Strategy, hosts: int | Sequence[int] | None) -> tuple[range, ...]:
    """Return the ranks of each host where hosts take them in their order."""
    if hosts is None and "LOCAL_WORLD_SIZE" in os.environ:
        per_host, total = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        sizes = [min(per_host, total - start) for start in range(0, total, per_host)]
    elif hosts is None:
        sizes = [s.workers]
    elif not isinstance(hosts, int):
        sizes = list(hosts)
    elif hosts < 1:
        raise InputError(f"hosts={hosts} are none; write hosts=1, or more")
    elif s.workers % hosts:
        raise InputError(
            f"hosts={hosts}: {s.workers} ranks can't be spread evenly over them; write hosts=1, or how many ranks each "
            f"host has, hosts=[{s.workers}]"
        )
    else:
        sizes = [s.workers // hosts] * hosts
    if sum(sizes) != s.workers or 0 in sizes:
        raise InputError(f"{_sizes_text(s)} = {s.workers} workers, but hosts={sizes} have {sum(sizes)}; write as many")
    return tuple(range(*ends) for ends in pairwise(accumulate(sizes, initial=0)))


def _groups(s: Strategy) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield kind, name and ranks of each group of ranks that communicate."""
    mesh = s.mesh
    for replica in range(s.replicas):
        for stage in range(s.stage_count):
            name, copies = f"replica {replica}, stage {stage}", _stage_ranks(s, replica, stage)
            # Shards that divide the operators of a stage.
            yield from (("shards", name, tuple(ranks)) for ranks in copies if len(ranks) > 1)
            # Shards of two stages: one shard of a stage sends to each shard of the next that takes its values.
            for sending in _stage_ranks(s, replica, stage - 1) if stage else []:
                for receiving in copies:
                    pairs = ((sending[shard % len(sending)], rank) for shard, rank in enumerate(receiving))
                    yield from (("stages", f"replica {replica}, stage {stage - 1} to {stage}", pair) for pair in pairs)
            # Workers of one replica that have the same part of A, and add up its gradient.
            if len(copies) > 1:
                for shard, ranks in enumerate(zip(*copies, strict=True)):
                    yield "copies", f"{name}, shard {shard}", ranks
    # Workers of different replicas that have the same part of A, and add up its gradient.
    if mesh.replicas > 1 and isinstance(s.aggregation, Synchronous):
        for rank in mesh.replica_ranks(0):
            place = mesh.coordinate(rank)
            peers = (mesh.rank(place._replace(replica=replica)) for replica in range(mesh.replicas))
            yield "peers", f"stage {place.stage}, shard {mesh.shard(place)}", tuple(peers)


def _stage_ranks(s: Strategy, replica: int, stage: int) -> list[list[int]]:
    """Return the ranks of each stage replica: one worker, or its shards."""
    return [s.mesh.stage_replica_ranks(replica, each) for each in s.mesh.stage_replicas if each.stage == stage]


def _sizes_text(s: Strategy) -> str:
    stages, shards = (
        str(sizes) if isinstance(sizes, int) else f"[{','.join(map(str, sizes))}]" for sizes in (s.stages, s.shards)
    )
    return f"replicas={s.replicas} × stages={stages} × shards={shards}"


def _hosts(numbers: Sequence[int]) -> str:
    """Return ``host 0``, ``hosts 0 and 1``, ``hosts 0, 1 and 2``."""
    *rest, last = map(str, numbers)
    return f"hosts {', '.join(rest)} and {last}" if rest else f"host {last}"
