"""Every compression that can be asked for, with random options."""

from hypothesis import strategies as st

from paceline.compression import Method, PowerSgd, TopK
from paceline.core.registry import registered

RATIOS = st.floats(0, 1, exclude_min=True, allow_subnormal=False)


def methods() -> st.SearchStrategy[Method]:
    """Of the registered ones; those with options have any that they may have."""
    plain = [cls for cls in registered(Method).values() if cls not in (PowerSgd, TopK)]
    return (
        st.sampled_from(plain).map(lambda cls: cls())
        | st.builds(PowerSgd, st.integers(1, 10**6))
        | st.builds(TopK, RATIOS)
    )
