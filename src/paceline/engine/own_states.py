"""Which replicas keep a state of their own from Δ to Δ, and where a checkpoint has it: ``replica/<number>/<name>``."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from paceline.aggregation.state_codec import kind
from paceline.checkpoint.base import TensorChunk
from paceline.core.delta import InPlace
from paceline.core.errors import InputError
from paceline.core.types import ReplicaId
from paceline.engine.run_context import RunContext
from paceline.replica.flat_state import FlatLayout
from paceline.replica.local_sgd import KeepsState

# Key of what is no tensor of these states, by replica, among what a checkpoint has of the engine.
KEY = "replicas"


def keeps_own_state(context: RunContext) -> bool:
    """Return whether replicas step by themselves, each with an optimizer of its own."""
    return context.local_sgd or isinstance(context.delta, InPlace)


def replica_prefix(replica: ReplicaId) -> str:
    """Return what the names of a replica's own tensors begin with."""
    return f"replica/{replica}/"


def replica_chunks(replica: ReplicaId, own: KeepsState) -> Iterator[TensorChunk]:
    """Yield what a replica keeps."""
    for chunk in own.chunks():
        yield replace(chunk, name=replica_prefix(replica) + chunk.name)


def restore_replica(context: RunContext, replica: ReplicaId, own: KeepsState, layout: FlatLayout) -> None:
    """Let a replica go on with what a checkpoint has of it, if anything.

    Args:
        context: of the run.
        replica: its number.
        own: the replica.
        layout: of A.
    """
    saved, resume = saved_states(context).get(replica), context.job.resume
    if saved is not None and resume is not None:
        own.restore(saved, resume.checkpoint.under(replica_prefix(replica)), layout)


def saved_states(context: RunContext) -> dict[ReplicaId, Mapping[str, Any]]:
    """Return what is no tensor of the states with which replicas go on; of the others, there is none.

    Those of another policy are none that replicas could go on with, nor are those of an optimizer with other options.
    """
    resume = context.job.resume
    if resume is None or not resume.options or not keeps_own_state(context):
        return {}
    run = resume.run
    if run.coordinator.policy_kind != kind(context.policy):
        return {}
    saved = run.engine.get(KEY, {})
    if not isinstance(saved, Mapping) or not all(
        str(r).isdecimal() and isinstance(v, Mapping) for r, v in saved.items()
    ):
        raise InputError(f"{resume.folder} can't be read: its states of replicas are none")
    return {int(replica): state for replica, state in saved.items() if int(replica) < context.replicas}
