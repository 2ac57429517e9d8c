"""Show where a pipeline is cut, how operators are sharded, and which rank is where, without training.

show_shards: how the operators of a model are divided, what that sends, and what stays whole and why.

show_mesh: which rank is where, on which host, and with whom it talks how often.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from paceline.aggregation import Synchronous
from paceline.api.train import check
from paceline.core.errors import InputError
from paceline.core.mesh import Mesh
from paceline.engine.base import Budget, Job
from paceline.engine.distributed.run import own_settings
from paceline.engine.run_context import first_batch, set_threads_and_seed
from paceline.program import Program
from paceline.replica import hybrid
from paceline.replica.base import Batch
from paceline.replica.hybrid import StagedSharding, StageTable
from paceline.replica.pipeline.prepare import first_rows, prepare_cut
from paceline.replica.pipeline.report import cut_table
from paceline.replica.tensor.prepare import plan_program
from paceline.replica.tensor.report import ShardingReport, sharding_report
from paceline.strategy import Strategy


def show_stages(program: Program, strategy: Strategy | str) -> str:
    """The table of a pipeline's stages: what each runs, its share of the time, its parameters, what it sends.

    The model is captured, measured, cut and checked as for a run, in this process; nothing is trained. Times are
    measured, so where several cuts are nearly as good another call may choose another one.

    Args:
        program: whose model it is.
        strategy: how it is split, a value or its text: ``"stages=2"``.

    Raises:
        InputError: what :func:`paceline.train` would refuse, or a strategy without stages.

    >>> import torch, functools
    >>> layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    >>> program = Program(
    ...     model=lambda: torch.nn.Sequential(*layers), loss=torch.nn.functional.mse_loss,
    ...     optimizer=functools.partial(torch.optim.SGD, lr=0.1), train=(torch.zeros(64, 8), torch.zeros(64, 8)))
    >>> print(show_stages(program, "stages=2 cuts=3"))
    2 stages; slowest: ... ms, forward and backward of one micro-batch; bytes sent: of one micro-batch, forward
    <BLANKLINE>
    stage  from  to  time  parameters  sends
        0  0     2   ... %         216  to 1: 256 B
        1  3     3   ... %          72
    """
    strategy = Strategy.coerce(strategy)
    check(program, strategy, steps=1)
    if strategy.order.parts(strategy.stage_count) < 2:
        raise InputError(f"stages={strategy.stage_count} leaves the model whole, so there is no cut; write stages=2")
    job = Job(program, strategy, Budget("steps", 1, 1))
    with own_settings():
        set_threads_and_seed(job, 0)
        made = prepare_cut(program, strategy, program.build(), first_batch(job), lambda choose: choose())
    assert made.costs is not None, "they were measured here"
    turns = [strategy.copies[strategy.order.worker_of(part.number, strategy.stage_count)] for part in made.cut.parts]
    return cut_table(made.cut, made.units, made.costs, turns)


def show_shards(program: Program, strategy: Strategy | str) -> str:
    """The table of a model's operators: how each is cut, the collectives and bytes of one batch, what stays whole.

    The model is captured and planned as for a run, in this process; nothing is trained and nothing is sent. Of a
    pipeline each stage has a table of its own: where ``cuts=`` do not say where stages begin, that is measured, and
    another call may choose other places.

    Args:
        program: whose model it is.
        strategy: how it is divided, a value or its text: ``"shards=2"``.

    Raises:
        InputError: what :func:`paceline.train` would refuse, or a strategy without shards.

    >>> import torch, functools
    >>> program = Program(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)),
    ...     loss=torch.nn.functional.mse_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    ...     train=(torch.zeros(64, 8), torch.zeros(64, 8)), batch_size=16)
    >>> print(show_shards(program, "shards=2"))
    2 shards; bytes: what a shard sends for one batch, forward and backward
    <BLANKLINE>
    module  operator  cut              parameters  forward     sends
    0       linear    column                  576
    2       linear    row                     520
    2       linear    partial → whole              all-reduce  512 B
    <BLANKLINE>
    divided: 100 % of 1,096 parameters, ... % of the work
    a step: 1 collective, 512 B sent by each shard
    parameters by shard: 552, 544

    Each stage of a pipeline is divided by itself; what goes from stage to stage is not in these tables:

    >>> print(show_shards(program, "stages=2 cuts=2 shards=[2,1] micro_batches=4"))
    stage 0: 2 shards; bytes: what a shard sends for one batch, forward and backward
    <BLANKLINE>
    module  operator  cut            parameters  forward       sends
    0       linear    column                576
    1       relu      split → whole              all-gather  2.05 kB
    <BLANKLINE>
    divided: 100 % of 576 parameters, 100 % of the work
    a step: 4 collectives, 2.05 kB sent by each shard
    parameters by shard: 288, 288
    <BLANKLINE>
    stage 1: whole, with 520 parameters
    """
    return str(divided(program, strategy))


def divided(program: Program, strategy: Strategy | str) -> ShardingReport | StagedSharding:
    """The same as a value, with its rows."""
    strategy = Strategy.coerce(strategy)
    check(program, strategy, steps=1)
    if not strategy.tensor_parallel:
        raise InputError(f"shards={strategy.shards} leaves the operators whole, so nothing is divided; write shards=2")
    job = Job(program, strategy, Budget("steps", 1, 1))
    with own_settings():
        set_threads_and_seed(job, 0)
        module, batch = job.program.build(), first_batch(job)
        if strategy.pipelined:
            return _staged(program, strategy, module, batch)
        with program.autocast(strategy.device):
            _, plan = plan_program(program, module, batch, max(strategy.stage_workers), strategy.shard_rules)
        return sharding_report(plan, strategy.shard_rules)


def _staged(program: Program, strategy: Strategy, module: nn.Module, batch: Batch) -> StagedSharding:
    """Of each part, for the micro-batches of a batch that a shard is given, each taken to be as large as the first."""
    cut, rules = prepare_cut(program, strategy, module, batch, lambda choose: choose()).cut, strategy.shard_rules
    stages = [strategy.order.worker_of(part.number, strategy.stage_count) for part in cut.parts]
    leaves = cut.captured.flatten(first_rows(strategy, batch))
    counts = [strategy.mesh.shards(stage) for stage in stages]
    plans = hybrid.plan_parts(hybrid.ShardingRequest(program, cut, module, leaves, counts, rules))
    found: list[StageTable] = []
    for part, stage, plan in zip(cut.parts, stages, plans, strict=True):
        passes = -(-strategy.micro_batch_count // strategy.copies[stage])
        parameters = sum(each.numel() for each in part.module.parameters())
        found.append(
            StageTable(stage, part.number, parameters, None if plan is None else sharding_report(plan, rules, passes))
        )
    return StagedSharding(found)


RULE = "shards of a stage stand in a row, then the stages of a replica, then replicas; hosts take them in that order"

MANY = 8
"""So many groups of a kind are written out."""


@dataclass(frozen=True)
class RankGroup:
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
    groups: tuple[RankGroup, ...]

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
        place = mesh.coordinate(rank)
        where = {"replica": place.replica, "stage": place.stage, "copy": mesh.stage_replica(place).copy}
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

    def _apart(self, group: RankGroup) -> str:
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
    groups = (RankGroup(k, n, r, tuple(sorted({_host(where, rank) for rank in r}))) for k, n, r in named)
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
    return [mesh.stage_replica_ranks(replica, column) for column in mesh.stage_replicas if column.stage == stage]


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
        place = mesh.coordinate(rank)
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
