"""How a framework goes about a step: what its own numbers don't say."""

from dataclasses import dataclass

from paceline.core.types import Seconds


@dataclass(frozen=True, slots=True)
class Habits:
    """How a framework goes about it: what a calibration fits, and what is measured on a host."""

    overlap: float = 0.0
    """Of summing over replicas: the part of backward, or for divided parameters of both passes, that it may hide in."""
    send_overlap: float = 0.0
    """The part of messages between stages that is hidden, of those that don't fill or empty the pipeline."""
    step_s: Seconds = 0.0
    """What each step takes beside all else."""
    micro_batch_s: Seconds = 0.0
    """What each micro-batch takes beside all else: its data, its loss, the framework's own work."""
    context_bytes: float = 0.0
    """What a worker's runtime holds."""
    fragmentation: float = 1.0
    """What activations and buffers really take, by what they are."""
    added_moves: float = 3.0
    """How many times each Δ of a step beyond the first moves its bytes: both are read and one is written; 0 where the
    product that makes it adds it (Megatron-LM's ``gradient_accumulation_fusion``)."""
