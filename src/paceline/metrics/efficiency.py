"""Costs of a batch size: how far each of its samples advances training.

φ, the noise scale, is what a run measures with ``noise_scale=True`` (:mod:`paceline.core.noise_scale`). From it, with B
samples in an update (McCandlish et al. 2018, arXiv 1812.06162, section 2; φ stands for B_crit)::

    updates needed     S = S_min · (1 + φ/B)       samples needed     E = E_min · (1 + B/φ)

so (S/S_min - 1)·(E/E_min - 1) = 1: at B = φ a run takes twice the least updates and twice the least samples.
"""

import math
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import InputError
from paceline.core.noise_scale import efficiency

__all__ = ["efficiency", "gain", "verdict"]


def gain(noise_scale: float, batch: float, reference: float) -> float:
    """Return the number of updates of ``reference`` samples that one of ``batch`` samples is worth: AdaScale's gain.

    (σ² + μ²)/(σ²/s + μ²) with s = batch/reference, σ²/μ² = φ/reference (Johnson et al. 2020, arXiv 2007.05105); it is
    s · :func:`efficiency`, and what AdaScale multiplies the learning rate by.

    Raises:
        InputError: a batch of no samples, or a φ below 0 or not finite.

    >>> gain(96.0, batch=128, reference=32), gain(0.0, batch=128, reference=32)
    (2.2857142857142856, 1.0)
    """
    for samples in (batch, reference):
        if not (samples > 0 and 0 <= noise_scale < math.inf):
            raise InputError(
                f"noise_scale={noise_scale!r} batch={samples!r}: a batch has samples, and a noise scale is a finite "
                "number of them; write noise_scale=500.0, batch=64"
            )
    return batch / reference * efficiency(noise_scale, batch, reference)


def verdict(summary: Mapping[str, Any]) -> str | None:
    """Return the conclusion of a run's summary about batch sizes, in one line; None if gradients were not measured.

    >>> verdict({"noise_scale_mean": 511.6, "noise_scale_error": 0.04, "noise_scale_biased": 0.0})
    'useful batch ≤ 512; beyond it each doubling wastes 33 % of its samples, and up to 50 % (± 4 %)'
    >>> verdict({"noise_scale_mean": None})
    'noise scale: the gradient could not be told from its noise; look at more updates, or at larger ones'
    """
    if "noise_scale_mean" not in summary:
        return None
    noise_scale, error = summary["noise_scale_mean"], summary.get("noise_scale_error")
    if noise_scale is None:
        return "noise scale: the gradient could not be told from its noise; look at more updates, or at larger ones"
    # At B = φ updates and samples are each twice the least; a batch twice as large wastes B/(φ + 2B) of its samples.
    batch = max(noise_scale, 1.0)
    wasted = f"{100 * batch / (noise_scale + 2 * batch):.0f} % of its samples, and up to 50 %"
    uncertainty = f" (± {100 * error:.0f} %)" if error is not None else ""
    biased = summary.get("noise_scale_biased") or 0.0
    caveat = f"; {100 * biased:.0f} % of it from gradients of different A: rather too large" if biased else ""
    return f"useful batch ≤ {round(batch):,}; beyond it each doubling wastes {wasted}{uncertainty}{caveat}"
