"""Rows about engines: what one does not support at all, and replicas that come and go, or die."""

from paceline.core.delta import Change, Gradient
from paceline.support.case import Case
from paceline.support.row import Row, in_place, real, used


def _unsupported(field: str) -> Row:
    """Return the row of a field of the strategy that an engine does not support."""
    return Row(
        lambda c: used(c, field) and not c.supports(field, c.features),
        "{feature}={value} is supported by engine={engines} alone, not by engine={engine}; leave it out, or write "
        "engine={engines}",
        field,
    )


def _alone(c: Case) -> bool:
    """Return True if the run is to survive deaths without a server that has A."""
    return c.survives_deaths and c.lockstep and "no-server" in c.features


_RESTART = "write checkpoint='ckpt', resume=True under torchrun --max-restarts=3"

ENGINE_ROWS: tuple[Row, ...] = (
    # ------------------------------------------------------------------------ what an engine does not support at all
    Row(
        lambda c: c.shards > 1 and "shards" not in c.features,
        "shards={s.shards}: engine={engine} does not divide operators; write engine={engines}",
        "shards",
    ),
    Row(
        lambda c: c.shard_rules and c.shards == 1,
        "shard_rules={s.shard_rules} say how operators are divided, but shards={s.shards} leaves them whole; write "
        "shards=2, or leave shard_rules out",
    ),
    Row(
        lambda c: c.pipelined and "stages" not in c.features,
        "stages={s.stages} micro_batches={s.micro_batch_count}: engine={engine} does not run pipelines; write "
        "engine={engines}",
        "stages",
    ),
    _unsupported("compression"),
    _unsupported("shard_parameters"),
    _unsupported("shard_optimizer"),
    Row(
        lambda c: (c.servers or 1) > 1 and "servers" not in c.features,
        "servers={s.servers}: under engine={engine} A is not divided among servers; write servers=1, or "
        "engine={engines}",
        "servers",
    ),
    Row(
        lambda c: (c.servers or 1) > 1 and c.lockstep and "no-server" in c.features,
        "servers={s.servers} have a slice of A each, but under engine={engine} aggregation={policy} every rank has A; "
        "leave servers out, or write aggregation=asynchronous",
    ),
    _unsupported("standby"),
    _unsupported("compile"),
    Row(
        lambda c: c.pull_ahead and "pull_ahead" not in c.features,
        "pull_ahead=True lets replicas compute while Δ and A travel, but under engine={engine} they lie in memory that "
        "all share; leave it out, or write engine={engines}",
        "pull_ahead",
    ),
    Row(
        lambda c: c.accumulate > 1 and not isinstance(c.policy.delta, Gradient),
        "accumulate={s.accumulate} is for policies that send gradients, but under aggregation={policy} replicas take "
        "steps of their own; write accumulate=1 and a longer period",
    ),
    Row(
        lambda c: c.times and real(c),
        "times= sets virtual time, but engine={engine} runs in real time; write engine='virtual'",
    ),
    Row(
        lambda c: not c.lockstep and "asynchronous" not in c.features,
        "aggregation={policy}: under engine={engine} all replicas make one update together; write "
        "aggregation=synchronous, or engine={engines}",
        "asynchronous",
    ),
    # ----------------------------------------------------------------- replicas that come and go, or die
    Row(
        lambda c: c.elastic and "elastic" not in c.features,
        "replicas={s.bounds}: under engine={engine} the number of replicas is fixed; write engine={engines}, or "
        "replicas={s.replicas}",
        "elastic",
    ),
    Row(
        lambda c: c.elastic and c.partition == "disjoint",
        "replicas={s.bounds} share one stream of batches, but under partition=disjoint each replica has its own "
        "subset; write partition=global, or replicas={s.replicas}",
    ),
    Row(
        lambda c: c.elastic and in_place(c),
        "replicas={s.bounds}: under aggregation={policy} a replica knows its next batches by itself, but those that "
        "come and go are given theirs; write aggregation=asynchronous, or replicas={s.replicas}",
    ),
    Row(
        lambda c: c.elastic and c.global_batch,
        "global_batch_size= divides a batch among all replicas, but the number of replicas={s.bounds} changes; write "
        "batch_size= in the program, or replicas={s.replicas}",
    ),
    Row(
        lambda c: c.elastic and c.on_death == "stop",
        "replicas={s.bounds} go on without replicas that are no more, but on_death='stop' ends the run at the first; "
        "leave on_death out, or write replicas={s.replicas}",
    ),
    Row(
        lambda c: c.survives_deaths and "on_death" not in c.features,
        "on_death={on_death}: engine={engine} has no replicas that could die, or all die with one; write "
        "engine={engines}",
        "on_death",
    ),
    Row(
        lambda c: c.on_death is not None and "virtual-time" in c.features,
        "on_death={on_death} is about processes, but engine={engine} has one; write engine=local, or leave it out",
    ),
    Row(
        lambda c: _alone(c) and c.several_workers,
        "on_death={on_death}: under engine={engine} each rank of a replica of several workers has the only copy of its "
        f"part of A; {_RESTART}, or engine='ray' (many hosts) or engine='local' (one)",
    ),
    Row(
        lambda c: c.on_death == "replace" and "no-server" in c.features,
        "on_death=replace: engine={engine} starts no processes, so it replaces none; write on_death='continue', under "
        "which a rank that is started again joins",
    ),
    Row(
        lambda c: _alone(c) and (bool(c.shard_optimizer) or c.shard_parameters),
        "on_death={on_death} needs A and its optimizer whole on every rank, but shard_optimizer or shard_parameters "
        f"divides them among the ranks; leave it out, or {_RESTART}",
    ),
    Row(
        lambda c: _alone(c) and c.compression != "none",
        "on_death={on_death} makes a round again, but by then compression={s.compression} has moved on what it keeps "
        f"for later; leave it out, or {_RESTART}",
    ),
    Row(
        lambda c: _alone(c) and isinstance(c.policy.delta, Change) and c.policy.delta.overlap > 0,
        "on_death={on_death} makes a round again, which under aggregation={policy} is under way while others compute; "
        "leave overlap out, or write on_death='stop'",
    ),
    Row(
        lambda c: _alone(c) and c.device != "cpu",
        "on_death={on_death} breaks collectives off, which is built for CPUs alone, not for device={s.device}; write "
        f"device=cpu, or {_RESTART}",
    ),
    Row(
        lambda c: _alone(c) and (c.noise_scale or c.on_nonfinite == "skip"),
        "on_death={on_death}: under engine={engine} a round that is made again takes no Δ twice, but noise_scale=True "
        f"and on_nonfinite='skip' do; leave them out, or {_RESTART}",
    ),
    Row(
        lambda c: c.survives_deaths and not c.flushes,
        "on_death={on_death} keeps A where it outlives replicas, but under schedule={s.schedule} each stage moves its "
        "weights by itself; write schedule=1f1b, or on_death='stop'",
    ),
    Row(
        lambda c: c.survives_deaths and bool(c.shard_optimizer) and c.several_workers,
        "on_death={on_death} keeps the optimizer's state where it outlives replicas, but shard_optimizer=True divides "
        "it among them; leave shard_optimizer out, or write on_death='stop'",
    ),
)
