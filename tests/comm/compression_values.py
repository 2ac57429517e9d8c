"""Every compression that can be requested, with random options."""

from typing import Any

from hypothesis import strategies as st

from paceline.compression import Compression
from paceline.compression.powersgd import PowerSgd
from paceline.compression.topk import TopK
from paceline.core.registry import registered

RATIOS = st.floats(0, 1, exclude_min=True, allow_subnormal=False)


def compressions() -> st.SearchStrategy[Compression[Any]]:
    """Draw one of the registered ones; those with options have any that they may have."""
    plain = [cls for cls in registered(Compression).values() if cls not in (PowerSgd, TopK)]
    return (
        st.sampled_from(plain).map(lambda cls: cls())
        | st.builds(PowerSgd, st.integers(1, 10**6))
        | st.builds(TopK, RATIOS)
    )
