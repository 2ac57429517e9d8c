"""Amounts as people read them."""

import math


def amount(nbytes: int) -> str:
    """Bytes with three digits and the unit that suits them.

    >>> amount(0), amount(512), amount(49_152), amount(1_000_000), amount(2_345_678_901)
    ('0 B', '512 B', '49.2 kB', '1 MB', '2.35 GB')
    """
    step = min(3, int(math.log(max(nbytes, 1), 1000) + 1e-9))
    return f"{nbytes / 1000**step:.3g} {('B', 'kB', 'MB', 'GB')[step]}"
