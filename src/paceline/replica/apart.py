"""How far two tensors are apart, in words; empty where it is near enough."""

import torch
from torch import Tensor


def gradients_apart(expected: Tensor | None, found: Tensor | None, ulps: float, scale: float) -> str:
    """The same of gradients, of which each may be missing: then it is 0. A found one that is 0 has no scale."""
    if expected is None or found is None:
        there = expected if found is None else found
        if there is None or not there.count_nonzero():
            return ""
        return f"is {'missing' if found is None else 'there'}, where the model has {'one' if found is None else 'none'}"
    return apart(expected, found, ulps, scale if found.count_nonzero() else 0.0)


def apart(expected: Tensor, found: Tensor, ulps: float, scale: float) -> str:
    """In words, how far two tensors are apart; empty where it is within ``ulps`` units of the last place.

    Args:
        expected: by its largest element that place is measured.
        found: the other.
        ulps: how many.
        scale: an element that there might have been, where it is larger.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"is {tuple(found.shape)} of {found.dtype} instead of {tuple(expected.shape)} of {expected.dtype}"
    if torch.equal(expected, found):
        return ""
    if not (expected.is_floating_point() or expected.is_complex()):
        return f"differs in {int((expected != found).sum())} of its {expected.numel()} elements"
    allowed = ulps * torch.finfo(expected.dtype).eps * max(largest(expected), scale)
    if torch.isclose(expected, found, rtol=0.0, atol=allowed, equal_nan=True).all():
        return ""
    gap = float((expected - found).abs().max())
    return f"differs by up to {gap:.3g}, its largest element being {largest(expected):.3g}"


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0
