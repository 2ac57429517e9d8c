"""What a published row's framework and precision say of how it was trained: kernels, states, recomputation."""

from paceline.plan.base import Arrangement, Numerics, Recomputed
from paceline.plan.calibration import work
from paceline.plan.calibration.rows import Row
from paceline.plan.shapes.kernels import Kernels


def recompute(row: Row) -> Recomputed:
    """By the first word."""
    text = row.text("recompute")
    return "full" if text.startswith("full") else "selective" if text.startswith("selective") else "none"


def newer(row: Row) -> bool:
    """Whether a framework of 2023 or later, on a device of its time: it sums gradients while it computes."""
    return (row.framework not in _OLDER or row.source.startswith("mcore")) and row.family not in _EARLIER


_OLDER = ("Megatron-DeepSpeed", "Megatron-LM", "TensorFlow+Horovod", "PyTorch")
_EARLIER = ("V100", "P100", "P40", "T4", "A64FX")
"""Devices from before the A100, which FlashAttention (2307.08691) needs."""


def kernels(row: Row) -> Kernels:
    """Newer frameworks never write attention's scores, and keep no copy of logits in full precision; torchtitan, with
    PyTorch's own loss, does."""
    fused = newer(row)
    titan = row.framework == TITAN
    return Kernels(fused_scores=fused, every_second=titan, fused_loss=fused and not titan, plain_loss=titan)


TITAN = "torchtitan"


def adds_in_products(row: Row) -> bool:
    """Whether a product of matrices adds the gradient that it makes to those before: Megatron's own, not DeepSpeed's.

    >>> [adds_in_products(Row({"framework": name})) for name in ("NeMo/Megatron-Core", "Megatron-DeepSpeed")]
    [True, False]
    """
    return "Megatron" in row.text("framework") and "DeepSpeed" not in row.text("framework")


def sequence_divided(row: Row) -> bool:
    """Whether shards divide what lies between operators as well: newer ones do, and whoever says so."""
    return newer(row) or "seqpar" in row.text("recompute")


def precision(row: Row) -> str:
    """In Paceline's words.

    >>> [precision(Row({"precision": text})) for text in ("fp16", "amp_bf16", "MXFP8", "NVFP4", "tf32", "")]
    ['fp16-mixed', 'bf16-mixed', 'fp8-mixed', 'fp4-mixed', 'tf32', 'fp16-mixed']
    """
    text = row.text("precision").lower()
    for name, found in _PRECISIONS.items():
        if name in text:
            return found
    return "fp16-mixed"


_PRECISIONS = {"fp8": "fp8-mixed", "float8": "fp8-mixed", "fp4": "fp4-mixed", "bf16": "bf16-mixed",
               "fp16": "fp16-mixed", "tf32": "tf32", "fp32": "fp32"}  # fmt: skip


def numerics(row: Row, at: Arrangement) -> Numerics:
    """Megatron keeps gradients in full precision, FSDP a single copy of parameters.

    DeepSpeed keeps gradients in half; ZeRO makes a copy in full of those that a worker updates (its stage_1_and_2.py,
    ``single_grad_partition``), and without ZeRO they are laid out once more to be summed (its engine.py,
    ``buffered_allreduce_fallback``). With stages torchtitan brings parameters together once a step, and keeps gradients
    of all until the last micro-batch beside the divided ones: :func:`keeps_whole`.
    """
    whole = precision(row) in ("fp32", "tf32")
    if row.framework == "Megatron-DeepSpeed":
        gradient = 4.0 if whole else 2.0
        copied = 0.0 if whole else 4.0
        again = copied if at.divided else gradient * _laid_out(row, at)
        return Numerics(gradient, gradient, (8 if whole else 12) + again)
    if whole:
        return Numerics(4, 4, 8)
    if keeps_whole(row):
        return Numerics(2, 4, 16)
    return Numerics(2, 4, 10) if at.divided == 3 else Numerics(2, 4, 12)


def _laid_out(row: Row, at: Arrangement) -> float:
    """The part of gradients that DeepSpeed lays out at a time; none where there is nobody to sum with."""
    own = work.whole(row) / at.shards / at.stages
    return min(1.0, _AT_A_TIME / own) if at.replicas > 1 else 0.0


_AT_A_TIME = 5e8
"""Elements: DeepSpeed's ``elements_per_buffer``."""


def keeps_whole(row: Row) -> bool:
    """Whether divided parameters stay together for a whole step: torchtitan's do where there are stages."""
    return row.framework == TITAN and row.whole("pp", 1) > 1
