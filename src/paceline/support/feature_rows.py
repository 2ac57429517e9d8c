"""Rows about features that exclude each other, whatever the engine, and about what is built for CPUs alone."""

from collections.abc import Callable

from paceline.core.delta import Change, Distance, Gradient
from paceline.strategy import GRAPH
from paceline.support.case import Case
from paceline.support.row import Row, in_place, real, used


def _whole_delta(field: str) -> Row:
    """Return the row of a field under which no rank has the sum of all Δs."""
    return Row(
        lambda c: c.noise_scale and used(c, field),
        f"noise_scale=True measures the sum of all Δs, of which under {field}=True each rank has a part alone; leave "
        "one of them out for the run that measures",
    )


def _between_replicas(field: str, applies: Callable[[Case], bool], workers: str) -> Row:
    """Return the row of a field about what replicas send, for replicas of several workers."""
    return Row(
        lambda c: applies(c) and used(c, field),
        f"{{feature}}={{value}} is about what whole replicas send each other, but {workers}; leave {{feature}} out",
        field,
    )


def _own_steps(field: str, what: str) -> Row:
    """Return the row of a field of the strategy that divides what each replica has whole where it steps by itself."""
    return Row(
        lambda c: used(c, field) and not isinstance(c.policy.delta, Gradient),
        f"{{feature}}={{value}} divides {what} among replicas, but under aggregation={{policy}} each takes steps of "
        "its own; leave it out, or write aggregation=synchronous",
        field,
    )


def _compiled_stages(c: Case) -> bool:
    """Return True if stages are compiled: in virtual time there are none, and the model is compiled whole."""
    return bool(c.compile) and c.pipelined and real(c)


def _in_turns(c: Case) -> bool:
    """Return True if Δ is sent in fragments, or summed while training goes on."""
    delta = c.policy.delta
    return isinstance(delta, Change) and (delta.fragments > 1 or delta.overlap > 0)


_SHARDS = "shards={s.shards} of one replica send parts of tensors"
_STAGES = "stages={s.stage_count} of one replica send activations alone"
_MOVES = "but under schedule={s.schedule} each stage moves its weights before the others have their gradients"

FEATURE_ROWS: tuple[Row, ...] = (
    # ------------------------------------------------ the gradient noise scale: whole Δs and their sum must be visible
    Row(
        lambda c: c.noise_scale and not isinstance(c.policy.delta, Gradient),
        "noise_scale=True measures gradients, but under aggregation={policy} replicas take steps of their own; write "
        "aggregation=synchronous, or leave noise_scale out",
    ),
    Row(
        lambda c: c.noise_scale and "noise_scale" not in c.features,
        "noise_scale=True: engine={engine} does not measure gradients; write engine={engines}",
        "noise_scale",
    ),
    _whole_delta("shard_optimizer"),
    _whole_delta("shard_parameters"),
    Row(
        lambda c: c.noise_scale and c.compression != "none",
        "noise_scale=True compares the norms of Δs with the norm of their sum, but compression={s.compression} changes "
        "what is summed; leave one of them out for the run that measures",
    ),
    Row(
        lambda c: c.noise_scale and not c.flushes,
        "noise_scale=True measures Δs of a whole model, but under schedule={s.schedule} each stage moves its weights "
        "by itself; write schedule=1f1b for the run that measures",
    ),
    Row(
        lambda c: c.noise_scale and c.policy.reducer is not None,
        "noise_scale=True compares the norms of Δs with the norm of their mean, but aggregation={policy} takes none; "
        "write aggregation=synchronous for the run that measures",
    ),
    # -------------------------------------------------------------------- Δs that are combined otherwise than summed
    Row(
        lambda c: c.policy.reducer is not None and not isinstance(c.policy.delta, Gradient),
        "aggregation={policy} combines Δs by a reducer, which takes gradients; write a delta that is Gradient()",
    ),
    Row(
        lambda c: c.policy.reducer is not None and c.policy.reducer.reads and c.policy.slots(c.replicas) > 1,
        "aggregation={policy}: its reducer needs A as a replica has read it, which is kept of one Δ of each; write "
        "slots() so that it returns 1",
    ),
    Row(
        lambda c: c.policy.reducer is not None and c.policy.reducer.reads and c.pull_ahead,
        "pull_ahead=true: a replica computes Δ of the A before the one that was sent last, but the reducer of "
        "aggregation={policy} needs the A that it was computed of; leave pull_ahead out",
    ),
    # ------------------------------------------------------ batches in portions, which any replica may compute
    Row(
        lambda c: used(c, "compression") and c.policy.portions is not None,
        "compression={s.compression} keeps what it has left out of a replica's Δs for the replica's next one, but "
        "under aggregation={policy} the sum must not depend on who has computed what; leave compression out",
    ),
    Row(
        lambda c: c.on_nonfinite == "skip" and c.policy.portions is not None,
        "on_nonfinite='skip' discards a Δ, but aggregation={policy} waits for all portions of a batch; write "
        "on_nonfinite='stop'",
    ),
    # --------------------------------------------------------------- Hogwild: replicas write one A, in one memory
    Row(
        lambda c: in_place(c) and c.shards > 1,
        "aggregation={policy}: replicas write one A in place, but each of shards={s.shards} has a part of A of its "
        "own; write aggregation=asynchronous",
    ),
    Row(
        lambda c: in_place(c) and c.pipelined,
        "aggregation={policy}: replicas write one A in place, step by step, but each of stages={s.stage_count} has a "
        "part of A of its own; write aggregation=asynchronous",
    ),
    Row(
        lambda c: in_place(c) and not real(c),
        "aggregation={policy} writes memory that replicas share, but engine={engine} runs one replica at a time; write "
        "engine=local",
    ),
    Row(
        lambda c: in_place(c) and "in-place" not in c.features,
        "aggregation={policy} writes memory that replicas share, but the replicas of engine={engine} share none; write "
        "engine=local",
    ),
    # --------------------------------------------------------------------- operators that are divided among workers
    _between_replicas("compression", lambda c: c.shards > 1, _SHARDS),
    _between_replicas("shard_parameters", lambda c: c.shards > 1, _SHARDS),
    Row(
        lambda c: c.shards > 1 and not c.flushes,
        "shards={s.shards}: under schedule={s.schedule} each stage moves its weights in the middle of a stream; shards "
        "of such stages are not built yet; write schedule=1f1b",
    ),
    Row(
        lambda c: c.shards > 1 and real(c) and c.schedule is not None and c.schedule.splits_backward,
        "schedule={s.schedule} splits the backward pass of each operator, which is not built for operators that "
        "shards={s.shards} divide; write schedule=1f1b",
    ),
    Row(
        lambda c: c.shards > 1 and real(c) and c.pipelined and c.recompute == "all",
        "recompute=all cuts a stage into pieces, which is not built for stages that shards={s.shards} divide; write "
        "recompute=boundaries",
    ),
    # -------------------------------------------------------------------------------------------------- pipelines
    Row(
        lambda c: real(c) and c.stage_replicas > 1 and c.schedule is not None and not c.schedule.allows_stage_replicas,
        "stages={copies}: several workers take turns at the micro-batches of a stage where a gradient is complete "
        "before it is applied and a worker has one part of the model, not under schedule={s.schedule}; write "
        "schedule=1f1b, or stages={s.stage_count}",
    ),
    Row(
        lambda c: real(c) and c.stage_replicas > c.micro_batches,
        "stages={copies} with micro_batches={s.micro_batch_count}: {most} workers take turns at them, so some would "
        "never have one; write micro_batches={enough}",
    ),
    _between_replicas("compression", lambda c: c.pipelined, _STAGES),
    _between_replicas("shard_parameters", lambda c: c.pipelined, _STAGES),
    # -------------------------------------- pipelines that never flush: weights move before all gradients are known
    Row(
        lambda c: not c.flushes and "async-stages" not in c.features,
        "schedule={s.schedule} moves weights within a stream of micro-batches, but engine={engine} computes each Δ as "
        "one process does, by one version; write schedule=1f1b, or engine={engines}",
        "async-stages",
    ),
    Row(
        lambda c: not c.flushes and c.replicas > 1,
        "replicas={s.replicas}: under schedule={s.schedule} each stage moves its weights by itself, before other "
        "replicas have sent their gradients; write replicas=1, or schedule=1f1b",
    ),
    Row(
        lambda c: not c.flushes and not (c.lockstep and isinstance(c.policy.delta, Gradient)),
        "aggregation={policy} says when A moves, but under schedule={s.schedule} each stage moves its weights by "
        "itself; write aggregation=synchronous, or schedule=1f1b",
    ),
    Row(
        lambda c: c.schedule is not None and c.schedule.updates_each and c.micro_batches > 1,
        "schedule={s.schedule} makes an update of each micro-batch, so micro_batches={s.micro_batches} of them are as "
        "many batches; write micro_batches=1 and a smaller batch_size=, or schedule=pipedream-2bw",
    ),
    Row(
        lambda c: not c.flushes and c.clip_norm is not None,
        f"clip_norm={{clip_norm}} scales a gradient by the norm of all of it, {_MOVES}; write clip_norm=None, or "
        "schedule=1f1b",
    ),
    Row(
        lambda c: not c.flushes and c.on_nonfinite == "skip",
        f"on_nonfinite='skip' discards a gradient of which any part is not finite, {_MOVES}; write "
        "on_nonfinite='stop', or schedule=1f1b",
    ),
    Row(
        lambda c: not c.flushes and c.accumulate > 1,
        "accumulate={s.accumulate} makes one update of several batches, but under schedule={s.schedule} each batch is "
        "one; write accumulate=1 and a larger batch_size=",
    ),
    Row(
        lambda c: not c.flushes and c.batchnorm == "mini-batch",
        "batchnorm=mini-batch waits for the end of a mini-batch, but under schedule={s.schedule} the next one begins "
        "before that; write batchnorm=micro-batch",
    ),
    # ------------------------------------------- replicas that compute on while Δ and A travel: Δs are of an older A
    Row(
        lambda c: c.pull_ahead and c.policy.current,
        "pull_ahead=True lets a replica compute on with an A that is older by an update, but aggregation={policy} "
        "combines Δs of the newest A alone; leave it out, or write aggregation=smooth-switch",
    ),
    Row(
        lambda c: c.pull_ahead and not isinstance(c.policy.delta, Gradient),
        "pull_ahead=True is for policies that send gradients, but under aggregation={policy} replicas take steps of "
        "their own, which no exchange interrupts; write a longer period, or aggregation=asynchronous",
    ),
    Row(
        lambda c: c.pull_ahead and c.elastic,
        "replicas={s.bounds} share one stream of batches, of which no replica knows its next one before its Δ has "
        "arrived, as pull_ahead=True has it; leave it out, or write replicas={s.replicas}",
    ),
    # ----------------------------------------- compiled parts: what has to happen between two of their operators
    Row(
        lambda c: c.compile == GRAPH and real(c) and (c.pipelined or c.shards > 1),
        "compile=graph makes one graph of forward, loss and backward, but a replica of several workers exchanges "
        "activations within them; write compile=true, which compiles each worker's part, or replicas={s.workers}",
    ),
    Row(
        lambda c: bool(c.compile) and c.shard_parameters,
        "compile={s.compile} makes one piece of forward and backward, but under shard_parameters=True each layer's "
        "parameters are gathered as it is called; leave one of them out",
    ),
    Row(
        lambda c: _compiled_stages(c) and not c.flushes,
        "compile={s.compile} lets backward read what torch.compile has kept of the weights, but under schedule="
        "{s.schedule} these move between forward and backward; write schedule=1f1b, or leave compile out",
    ),
    Row(
        lambda c: _compiled_stages(c) and c.schedule is not None and c.schedule.splits_backward,
        "schedule={s.schedule} splits the backward pass of each operator, but compile=True makes one of all; write "
        "schedule=1f1b, or leave compile out",
    ),
    Row(
        lambda c: _compiled_stages(c) and c.recompute != "none",
        "recompute={s.recompute} runs forward again for backward, but under compile=True torch.compile decides what "
        "backward computes again; leave one of them out",
    ),
    Row(
        lambda c: _compiled_stages(c) and c.batchnorm == "mini-batch",
        "batchnorm=mini-batch adds up the statistics of each BatchNorm beside its forward, which compile=True compiles "
        "as it is; write batchnorm=micro-batch, or leave compile out",
    ),
    # ---------------------------------------------------------- FSDP2: each rank keeps a part of the parameters
    _own_steps("shard_parameters", "the parameters"),
    Row(
        lambda c: c.shard_parameters and c.compression != "none",
        "shard_parameters=True sums each layer's gradients as they come, and compression={s.compression} all of Δ at "
        "once; leave one of them out",
    ),
    Row(
        lambda c: c.shard_parameters and c.shard_optimizer is False,
        "shard_parameters=True divides the optimizer's state as well, but shard_optimizer=False; leave shard_optimizer "
        "out",
    ),
    Row(
        lambda c: c.shard_parameters and c.on_nonfinite == "skip",
        "on_nonfinite='skip' discards a bad Δ, but shard_parameters=True has added it to the others' by then; write "
        "on_nonfinite='stop' or leave shard_parameters out",
    ),
    Row(
        lambda c: c.shard_parameters and c.accumulate > 1 and getattr(c.policy, "combine", "mean") == "sum",
        "shard_parameters=True adds a batch before it is known how many samples its accumulate={s.accumulate} batches "
        "have together, which combine=sum divides by; write combine=mean or accumulate=1",
    ),
    # --------------------------------------- ZeRO-1: workers with the same part of A divide the optimizer's state
    _own_steps("shard_optimizer", "the state of one optimizer"),
    Row(
        lambda c: bool(c.shard_optimizer) and c.compression != "none",
        "shard_optimizer=True sends each rank its part of Δ, and compression={s.compression} all of it; leave one of "
        "them out",
    ),
    Row(
        lambda c: bool(c.shard_optimizer) and c.several_workers and not c.lockstep,
        "shard_optimizer=True is for replicas that make one update together, but under aggregation={policy} the "
        "optimizer's state is kept once, in memory that all share; write aggregation=synchronous, or leave "
        "shard_optimizer out",
    ),
    Row(
        lambda c: bool(c.shard_optimizer) and not c.flushes,
        "shard_optimizer=True steps on the sum of all replicas' Δs, but under schedule={s.schedule} each stage moves "
        "its weights by itself; write replicas=2 schedule=1f1b, or leave shard_optimizer out",
    ),
    Row(
        lambda c: bool(c.shard_optimizer) and c.several_workers and c.replicas == 1 and c.stage_replicas == 1,
        "shard_optimizer=True divides the optimizer's state among the workers that have the same part of A, but of "
        "replicas=1 stages={s.stages} shards={s.shards} no two have; write replicas=2, or leave shard_optimizer out",
    ),
    # ------------------------------------------------------------------------------------ what is built for CPUs alone
    Row(
        lambda c: c.device != "cpu" and "accelerator" not in c.features,
        "engine={engine} computes on the CPU, not on device={s.device}; write device=cpu",
    ),
    Row(
        lambda c: c.device != "cpu" and c.pipelined and "accelerator-stages" not in c.features,
        "device={s.device}: under engine={engine} the stages of a replica communicate through the host's memory; write "
        "device=cpu, or engine={engines}",
        "accelerator-stages",
    ),
    Row(
        lambda c: used(c, "compression") and isinstance(c.policy.delta, Distance) and "no-server" not in c.features,
        "compression={s.compression} leaves out small parts of a Δ, but under aggregation={policy} a replica sends its "
        "parameters themselves; leave it out, or write aggregation=local-steps",
    ),
    Row(
        lambda c: used(c, "compression") and _in_turns(c),
        "compression={s.compression} sums all of Δ and at once, but aggregation={policy} sends fragments, or while "
        "others compute; leave one of them out",
    ),
)
