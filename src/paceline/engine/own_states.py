"""Which replicas keep a state of their own from Δ to Δ, and where a checkpoint has it: ``replica/<number>/<name>``."""

from collections.abc import Mapping
from typing import Any

from paceline.aggregation.state_codec import kind
from paceline.core.delta import InPlace
from paceline.core.errors import InputError
from paceline.core.types import ReplicaId
from paceline.engine.run_context import RunContext

# Key of what is no tensor of these states, by replica, among what a checkpoint has of the engine.
KEY = "replicas"


def keeps_own_state(context: RunContext) -> bool:
    """Return whether replicas step by themselves, each with an optimizer of its own."""
    return context.local_sgd or isinstance(context.delta, InPlace)


def replica_prefix(replica: ReplicaId) -> str:
    """Return what the names of a replica's own tensors begin with."""
    return f"replica/{replica}/"


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
