"""How far two tensors are apart, in units of the last place, and how far a version of a model may be from it."""

import torch
from torch import Tensor, nn

from paceline.replica.module_utils import tensors_of

# Tolerance of versions that add up in another order. A sum over n terms then differs by about √n units in the last
# place, and what follows carries that on, layer by layer. A wrong cut or kernel differs by the size of the tensor
# itself, 2^23 units in float32.
REORDERED = 2.0**12

# Tolerance relative to a tensor's largest element, in half precision or under autocast: a unit in the last place is
# 2^-7 of it in bf16, and the tolerance must stay below what a wrong version differs by.
HALF = 2.0**-3


def reordered_ulps(module: nn.Module) -> float:
    """Return the tolerance of a version of a model that adds up in another order, under the autocast of the call."""
    tensors = tensors_of(module).values()
    units = (torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point() or t.is_complex())
    half = HALF / max(units, default=torch.finfo(torch.float32).eps)  # a part may have no tensors of its own
    autocast = any(torch.is_autocast_enabled(kind) for kind in {t.device.type for t in tensors})
    return half if autocast else min(REORDERED, half)


def gradient_difference(
    expected: Tensor | None, actual: Tensor | None, ulps: float, scale: float, eps: float = 0.0
) -> str:
    """Return :func:`difference` of gradients, of which each may be missing: then it is 0. An actual 0 has no scale."""
    if expected is None or actual is None:
        only = expected if actual is None else actual
        if only is None or not only.count_nonzero():
            return ""
        return (
            f"is {'missing' if actual is None else 'there'}, where the model has {'one' if actual is None else 'none'}"
        )
    return difference(expected, actual, ulps, scale if actual.count_nonzero() else 0.0, eps)


def difference(expected: Tensor, actual: Tensor, ulps: float, scale: float, eps: float = 0.0) -> str:
    """Return in words how far two tensors are apart; empty where it is within ``ulps`` units of the last place.

    Args:
        expected: its largest element defines that place.
        actual: the other.
        ulps: how many.
        scale: an element that defines it instead, if it is larger.
        eps: relative distance of two numbers of the lowest precision that they were computed with, if that is not
            their own.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"is {tuple(actual.shape)} of {actual.dtype} instead of {tuple(expected.shape)} of {expected.dtype}"
    if torch.equal(expected, actual):
        return ""
    if not (expected.is_floating_point() or expected.is_complex()):
        return f"differs in {int((expected != actual).sum())} of its {expected.numel()} elements"
    allowed = ulps * max(torch.finfo(expected.dtype).eps, eps) * max(largest(expected), scale)
    if torch.isclose(expected, actual, rtol=0.0, atol=allowed, equal_nan=True).all():
        return ""
    gap = float((expected - actual).abs().max())
    return f"differs by up to {gap:.3g}, its largest element being {largest(expected):.3g}"


def largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude."""
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0
