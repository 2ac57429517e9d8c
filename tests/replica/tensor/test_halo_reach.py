"""Elements that each shard needs of a sharded dim, against the definition of a window."""

import random

from paceline.replica.tensor.halo import HaloReach, SlidingWindow, halo_reach
from paceline.replica.tensor.placements import Shard


def drawn(seed: int) -> HaloReach | None:
    """Of a dim of some length, in parts of some lengths."""
    draw = random.Random(seed)
    shards, length = draw.randint(1, 4), draw.randint(4, 20)
    borders = sorted(draw.sample(range(1, length), shards - 1))
    sizes = tuple(b - a for a, b in zip((0, *borders), (*borders, length), strict=True))
    windows = SlidingWindow(draw.randint(1, 7), draw.randint(1, 4), draw.randint(0, 4), draw.randint(1, 3))
    made = (length + 2 * windows.before - windows.reach) // windows.stride + 1
    return halo_reach(Shard(-1, sizes), made, windows)


def seen(reach: HaloReach, shard: int) -> list[int]:
    """The elements that the windows of a shard reach over, padding included."""
    start, windows = reach.makes.offsets[shard], reach.windows
    firsts = [i * windows.stride - windows.before for i in range(start, start + reach.makes.sizes[shard])]
    return list(range(firsts[0], firsts[-1] + windows.dilation * (windows.size - 1) + 1))


def test_all_that_a_window_sees_is_there() -> None:
    tried = [reach for reach in map(drawn, range(3000)) if reach is not None]
    assert len(tried) > 1000
    for reach in tried:
        shards = range(len(reach.has.sizes))
        assert sum(reach.makes.sizes) == reach.makes.length
        for shard in shards:
            every, needs = seen(reach, shard), reach.needs(shard)
            assert list(needs) == [each for each in every if 0 <= each < reach.has.length], reach
            before, after = reach.padding(shard)
            assert (before, after) >= (0, 0)
            assert before + len(needs) + after == len(every), reach
            assert before == len([each for each in every if each < 0]) or not needs, reach
            assert [each for other in shards for each in reach.of(shard, other)] == list(needs), reach
            others = {each for other in shards if other != shard for each in reach.needs(other)}
            assert list(reach.given(shard)) == sorted(others & set(reach.own(shard))), reach


def test_parts_stay_as_they_are_where_the_result_is_as_long() -> None:
    reach = halo_reach(Shard(-2, (3, 5)), 8, SlidingWindow(3, before=1))
    assert reach is not None
    assert reach.makes == Shard(-2, (3, 5))
    assert (reach.needs(0), reach.needs(1)) == (range(4), range(2, 8))
    assert reach.crossed == 2


def test_windows_beside_one_another_send_nothing() -> None:
    reach = halo_reach(Shard(-1, (6, 6)), 4, SlidingWindow(3, stride=3))
    assert reach is not None
    assert reach.crossed == 0


def test_what_not_all_shards_would_have_a_part_of_is_not_divided() -> None:
    assert halo_reach(Shard(-1, (2, 2, 2)), 2, SlidingWindow(3, stride=2)) is None
    assert halo_reach(Shard(-1, (6, 0)), 6, SlidingWindow(1)) is None
    assert halo_reach(Shard(-1, (2, 2), blocks=2), 8, SlidingWindow(1)) is None
