"""Fit of the three constants of a device's matrix products (paceline.planner.shapes.gemm_time) to measured times."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.shapes.gemm_time import Product, Products


def fitted(products: Sequence[Product], seconds: Sequence[Seconds], multiprocessors: int) -> Products:
    """Return the constants with the least mean relative error, by iteratively reweighted least squares.

    Args:
        products: that were measured; at least three, of different sizes.
        seconds: of each.
        multiprocessors: of the device.

    Raises:
        InputError: fewer than three, not as many times, or times from which no rate above 0 follows.
    """
    if len(products) < _CONSTANTS or len(products) != len(seconds):
        raise InputError(
            f"{len(products)} products with {len(seconds)} times do not give three constants; write at least three of "
            "each."
        )
    if len({each.flops for each in products}) == 1:
        raise InputError(f"all products are of {products[0].flops:g} operations; write products of several sizes.")
    columns = [[1.0, each.flops, each.rounded_flops(multiprocessors) - each.flops] for each in products]
    start_s, s_per_flop, s_per_lost = _least(np.array(columns), np.array(seconds, dtype=np.float64))
    if not s_per_flop > 0:
        raise InputError("these times do not grow with the products' sizes; write what was measured, in seconds.")
    waits = min(1.0, max(0.0, s_per_lost / s_per_flop))
    return Products(1.0 / s_per_flop, max(0.0, start_s), waits, multiprocessors)


def relative_errors(device: Products, products: Iterable[Product], seconds: Iterable[Seconds]) -> list[float]:
    """Return (predicted - measured) / measured of each."""
    return [device.seconds(each) / took - 1.0 for each, took in zip(products, seconds, strict=True)]


_CONSTANTS = 3
_ROUNDS = 40
_LEAST_ERROR = 0.01
"""Below it an error weighs no more than this one does: 1 % is what a measurement is good for."""


def _least(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return coefficients with the least Σ |error| / seconds: each round weighs by the errors of the one before it."""
    scales = np.abs(columns).max(axis=0)
    scales[scales == 0] = 1.0
    relative = columns / scales / seconds[:, None]
    roots = np.ones(len(seconds))
    result = np.zeros(_CONSTANTS)
    for _ in range(_ROUNDS):
        result = np.linalg.lstsq(relative * roots[:, None], roots, rcond=None)[0]
        roots = 1.0 / np.sqrt(np.maximum(np.abs(relative @ result - 1.0), _LEAST_ERROR))
    start_s, s_per_flop, s_per_lost = (float(each) for each in result / scales)
    return start_s, s_per_flop, s_per_lost
