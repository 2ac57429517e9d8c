"""The histogram of staleness: what its bars tell apart, and what they put together."""

import numpy as np
import pytest

from paceline.report.figures import binned, reach


def test_bars_reach_to_where_99_percent_lie() -> None:
    assert reach({0: 50, 7: 49, 1000: 1}) == 7
    assert reach({0: 50, 7: 40, 1000: 10}) == 1000
    assert reach({3: 1}) == 3


def test_what_lies_beyond_is_one_bar_after_the_others() -> None:
    at, shares = binned({0: 50, 7: 48, 400: 1, 1000: 1}, width=2, reach=7)
    assert at.tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert shares == pytest.approx([0.5, 0, 0, 0.48, 0.02])
    assert np.sum(shares) == pytest.approx(1)
