"""How a rank steps on its part of A, and where it meets the others for that."""

from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.held import Held
from paceline.engine.distributed.norms import Norms
from paceline.engine.distributed.sharded import Sharded
from paceline.engine.distributed.stages import Staged, StagedExchange
from paceline.engine.distributed.update import Update
from paceline.engine.team.circles import holders
from paceline.engine.team.here import Here
from paceline.engine.team.traffic import Traffic


def stepping(
    here: Here, held: Held, freight: Freight, peers: Traffic | None, *, by_tensor: bool = False
) -> tuple[Update, StagedExchange]:
    """What makes updates here, and the exchange before them; all ranks make it together.

    Args:
        here: the rank.
        held: its part of A.
        freight: what it brings.
        peers: by which those meet who have the same part in other replicas; None: there is one replica.
        by_tensor: whether gradients may stay outside the freight.
    """
    job, mesh, rank, traffic = here.setup.job, here.mesh, here.team.world.rank, here.team.traffic
    if traffic is None or not job.strategy.shard_optimizer:
        norms = Norms(job, freight.state, held.counted, held.whole) if job.noise_scale else None
        clipped = held.counted if job.program.clip_norm is not None else ()
        exchange = StagedExchange(freight, freight.vectors, clipped, mesh, rank, traffic, peers, norms=norms)
        update = Staged(job.program, freight, held, exchange, by_tensor=by_tensor and norms is None)
        if norms is not None:
            norms.measure_by(update.stepper)
        return update, exchange
    circle = holders(mesh, rank, traffic, peers)
    divided = Sharded(job.program, freight, held, circle, traffic)
    first = mesh.column(mesh.place(rank)).copy == 0  # each copy of a stage has the whole Δ of its replica
    exchange = StagedExchange(freight, divided.meeting, (), mesh, rank, traffic, circle.traffic, brings=first)
    return divided, exchange
