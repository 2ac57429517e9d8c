"""What is said of a Δ that is not finite."""

from paceline.core.errors import NonFiniteError
from paceline.core.types import Clock, ReplicaId
from paceline.replica.base import Measured


def refuse_nonfinite(measured: Measured, replica: ReplicaId, clock: Clock) -> None:
    """Raise NonFiniteError where a Δ is not finite."""
    if not measured.finite:
        raise NonFiniteError(
            f"the Δ of replica {replica} at its step {clock} is not finite (loss {measured.loss:g}); lower the "
            "learning rate, set clip_norm=, or write on_nonfinite='skip' to discard such Δs and count them"
        )
