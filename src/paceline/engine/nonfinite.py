"""What is said of a Δ that is not finite."""

from paceline.core.errors import NonFiniteError
from paceline.core.types import Clock, ReplicaId


def not_finite(loss: float, replica: ReplicaId, clock: Clock) -> NonFiniteError:
    """The error that ends a run where nothing is to be skipped."""
    return NonFiniteError(
        f"the Δ of replica {replica} at its step {clock} is not finite (loss {loss:g}); lower the learning rate, set "
        "clip_norm=, or write on_nonfinite='skip' to discard such Δs and count them"
    )
