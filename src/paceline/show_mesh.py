"""show_mesh: which rank is where, on which host, and with whom it talks how often."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from paceline.aggregation import Synchronous
from paceline.core.errors import InputError
from paceline.core.mesh import Mesh
from paceline.strategy import Strategy

RULE = "shards of a stage stand in a row, then the stages of a replica, then replicas; hosts take them in that order"

MANY = 8
"""So many groups of a kind are written out."""


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other."""

    kind: str
    """``shards``, ``stages``, ``copies`` or ``peers``."""
    name: str
    """Which of them: ``replica 0, stage 1``."""
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    """On which hosts they are, ascending."""


@dataclass(frozen=True)
class Drawing:
    """A mesh on its hosts."""

    strategy: Strategy
    hosts: tuple[range, ...]
    """The ranks of each host."""
    groups: tuple[Group, ...]

    def host(self, rank: int) -> int:
        """Where a rank runs."""
        return _host(self.hosts, rank)

    @property
    def warnings(self) -> list[str]:
        """Of each stage whose shards are on several hosts."""
        return [self._apart(each) for each in self.groups if each.kind == "shards" and len(each.hosts) > 1]

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "ranks": [self._placed(rank) for rank in range(self.strategy.workers)],
            "hosts": [list(host) for host in self.hosts],
            "groups": [{"kind": g.kind, "name": g.name, "ranks": g.ranks, "hosts": g.hosts} for g in self.groups],
            "warnings": self.warnings,
        }

    def _placed(self, rank: int) -> dict[str, int]:
        mesh = self.strategy.mesh
        place = mesh.place(rank)
        where = {"replica": place.replica, "stage": place.stage, "copy": mesh.column(place).copy}
        return {"rank": rank, "host": self.host(rank), **where, "shard": mesh.shard(place)}

    def __str__(self) -> str:
        blocks = (self._head(), self._grid(), self._talk(), [f"placement: {RULE}"], self.warnings)
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def _head(self) -> list[str]:
        s = self.strategy
        mesh = f"replicas={s.replicas} × stages={_said(s.stages)} × shards={_said(s.shards)}"
        border = "; | is between two hosts" if len(self.hosts) > 1 else ""
        turns = "; + is between those who take turns at a stage" if s.replicated else ""
        return [f"{mesh} = {_some(s.workers, 'rank')} on {_some(len(self.hosts), 'host')}{border}{turns}"]

    def _grid(self) -> list[str]:
        mesh = self.strategy.mesh
        stages, replicas = range(len(mesh.stage_workers)), range(mesh.replicas)
        rows = [["", *(f"replica {replica}" for replica in replicas)]]
        if len(self.hosts) > 1:
            rows.append(["", *(_hosts(sorted(set(map(self.host, mesh.replica_ranks(r))))) for r in replicas)])
        for stage in stages:
            cells = (self._cell(_columns(mesh, replica, stage)) for replica in replicas)
            rows.append([f"stage {stage}", *cells])
        return _aligned(rows)

    def _cell(self, columns: Sequence[Sequence[int]]) -> str:
        width, first = len(str(self.strategy.workers - 1)), [column[0] for column in columns[1:]]
        ranks = [rank for column in columns for rank in column]
        text = f"{ranks[0]:{width}}"
        for before, rank in pairwise(ranks):
            marks = ("+" if rank in first else "", "|" if self.host(before) != self.host(rank) else "")
            text += " ".join(["", *filter(None, marks), f"{rank:{width}}"])
        return text

    def _talk(self) -> list[str]:
        rows = [self._row(kind, what, when) for kind, what, when in _TALK]
        found = [row for row in rows if row]
        if not isinstance(self.strategy.aggregation, Synchronous) and self.strategy.replicas > 1:
            found.append(["each replica and A", "when its policy lets it", "", "in shared memory"])
        return _aligned(found)

    def _row(self, kind: str, what: str, when: str) -> list[str]:
        groups = [group for group in self.groups if group.kind == kind]
        if not groups:
            return []
        joint = ">" if kind == "stages" else "-"
        apart = sum(len(group.hosts) > 1 for group in groups)
        where = "each inside a host" if not apart else f"{apart} of {len(groups)} between hosts"
        said = [joint.join(map(str, group.ranks)) for group in groups]
        return [what, when, " ".join(said if len(said) <= MANY else [*said[:MANY], "…"]), where]

    def _apart(self, group: Group) -> str:
        wide = len(group.ranks)
        ranks, least = "-".join(map(str, group.ranks)), min(map(len, self.hosts))
        room = least // wide * wide
        instead = f"start {room} ranks on each host" if room else f"write shards={least} or fewer"
        return (
            f"warning: the shards of {group.name} (ranks {ranks}) are on {_hosts(group.hosts)}: every operator that is "
            f"divided waits for the network between them; {instead}"
        )


_TALK = (
    ("shards", "shards of a stage", "several times in each layer"),
    ("stages", "from stage to stage", "each micro-batch, there and back"),
    ("copies", "copies of a stage", "once a step"),
    ("peers", "peers of a part", "once a step"),
)


def show_mesh(strategy: Strategy | str, hosts: int | Sequence[int] | None = None) -> str:
    """The drawing of a mesh: ranks by replica, stage and shard, hosts, and the groups that talk to each other.

    Nothing is started. Each group's line says how often it talks, so that one sees what the network between hosts has
    to carry.

    Args:
        strategy: a value or its text: ``"replicas=2 stages=2 shards=2"``.
        hosts: over how many hosts its ranks are spread evenly, or how many ranks each host has; None: as torchrun has
            it where it has started this process (``LOCAL_WORLD_SIZE`` on each), else one host.

    Raises:
        InputError: the hosts don't have as many ranks as the strategy has workers.

    >>> print(show_mesh("replicas=2 stages=2 shards=2", hosts=2))
    replicas=2 × stages=2 × shards=2 = 8 ranks on 2 hosts; | is between two hosts
    <BLANKLINE>
             replica 0  replica 1
             host 0     host 1
    stage 0  0 1        4 5
    stage 1  2 3        6 7
    <BLANKLINE>
    shards of a stage    several times in each layer       0-1 2-3 4-5 6-7  each inside a host
    from stage to stage  each micro-batch, there and back  0>2 1>3 4>6 5>7  each inside a host
    peers of a part      once a step                       0-4 1-5 2-6 3-7  4 of 4 between hosts
    <BLANKLINE>
    placement: shards of a stage stand in a row, then the stages of a replica, then replicas; hosts take them in that
    order
    """
    return str(drawn(strategy, hosts))


def drawn(strategy: Strategy | str, hosts: int | Sequence[int] | None = None) -> Drawing:
    """The same as a value."""
    strategy = Strategy.coerce(strategy)
    where = tuple(_spread(strategy, _sizes(strategy.workers, hosts)))
    named = [*_shards(strategy), *_stages(strategy), *_copies(strategy), *_peers(strategy)]
    groups = (Group(k, n, r, tuple(sorted({_host(where, rank) for rank in r}))) for k, n, r in named)
    return Drawing(strategy, where, tuple(groups))


def _sizes(workers: int, hosts: int | Sequence[int] | None) -> list[int]:
    """How many ranks each host has."""
    if hosts is None and "LOCAL_WORLD_SIZE" in os.environ:
        each, all_ = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        return [min(each, all_ - start) for start in range(0, all_, each)]
    if hosts is None:
        return [workers]
    if not isinstance(hosts, int):
        return list(hosts)
    if hosts < 1 or workers % hosts:
        raise InputError(
            f"hosts={hosts}: {workers} ranks can't be spread evenly over them; write hosts=1, or how many ranks each "
            f"host has, hosts=[{workers}]"
        )
    return [workers // hosts] * hosts


def _spread(strategy: Strategy, sizes: Sequence[int]) -> Iterator[range]:
    s = strategy
    if sum(sizes) != s.workers or 0 in sizes:
        raise InputError(
            f"replicas={s.replicas} × stages={_said(s.stages)} × shards={_said(s.shards)} = {s.workers} workers, but "
            f"hosts={list(sizes)} have {sum(sizes)}; write as many"
        )
    yield from (range(*ends) for ends in pairwise(accumulate(sizes, initial=0)))


def _host(hosts: Sequence[range], rank: int) -> int:
    return next(number for number, ranks in enumerate(hosts) if rank in ranks)


def _columns(mesh: Mesh, replica: int, stage: int) -> list[list[int]]:
    """The ranks of each of those who take turns at a stage: one, or its shards."""
    return [mesh.column_ranks(replica, column) for column in mesh.columns if column.stage == stage]


_Named = tuple[str, str, tuple[int, ...]]


def _shards(strategy: Strategy) -> Iterator[_Named]:
    """Who divide the operators of a stage."""
    for replica, stage, columns in _stages_of(strategy):
        name = f"replica {replica}, stage {stage}"
        yield from (("shards", name, tuple(column)) for column in columns if len(column) > 1)


def _stages(strategy: Strategy) -> Iterator[_Named]:
    """Who sends to whom from one stage to the next: one shard to each that takes its values."""
    for replica, stage, columns in _stages_of(strategy):
        before = _columns(strategy.mesh, replica, stage - 1) if stage else []
        name = f"replica {replica}, stage {stage - 1} to {stage}"
        for mine in before:
            for theirs in columns:
                yield from (("stages", name, (mine[shard % len(mine)], rank)) for shard, rank in enumerate(theirs))


def _copies(strategy: Strategy) -> Iterator[_Named]:
    """Who have the same part of A in one replica, and add up its gradient."""
    for replica, stage, columns in _stages_of(strategy):
        for shard, ranks in enumerate(zip(*columns, strict=True)):
            if len(ranks) > 1:
                yield "copies", f"replica {replica}, stage {stage}, shard {shard}", ranks


def _peers(strategy: Strategy) -> Iterator[_Named]:
    """Who have the same part of A in different replicas, and add up its gradient."""
    mesh = strategy.mesh
    if mesh.replicas == 1 or not isinstance(strategy.aggregation, Synchronous):
        return
    for rank in mesh.replica_ranks(0):
        place = mesh.place(rank)
        others = (mesh.rank(place._replace(replica=replica)) for replica in range(mesh.replicas))
        yield "peers", f"stage {place.stage}, shard {mesh.shard(place)}", tuple(others)


def _stages_of(strategy: Strategy) -> Iterator[tuple[int, int, list[list[int]]]]:
    """Of each replica its stages, and the ranks of each."""
    for replica in range(strategy.replicas):
        for stage in range(strategy.stage_count):
            yield replica, stage, _columns(strategy.mesh, replica, stage)


def _said(sizes: int | tuple[int, ...]) -> str:
    return str(sizes) if isinstance(sizes, int) else f"[{','.join(map(str, sizes))}]"


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _hosts(numbers: Sequence[int]) -> str:
    """``host 0``, ``hosts 0 and 1``, ``hosts 0, 1 and 2``."""
    *rest, last = map(str, numbers)
    return f"hosts {', '.join(rest)} and {last}" if rest else f"host {last}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
