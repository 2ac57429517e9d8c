"""The page of messages and products of matrices."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from kit.sheet import Row
from kit.words import grid

HEAD = """\
# Messages and products of matrices, predicted and measured

    python benchmarks/planner/messages.py

Nothing is measured here: what `knots` and `collectives` of `paceline.planner` and `paceline.planner.shapes.gemm_time`
predict is held to what others have published. An error is |predicted - measured| / measured; *mean* is over sizes and
then over numbers of workers, *worst curve* the largest of the means over sizes, *worst* one size's.
"""

MESSAGES = """\
## Messages

`all_reduce` of NCCL inside a host of 2 to 8 workers, 1 MiB to 1 GiB (vTrain, 2312.12391). Between knots a curve is a
straight line. Knots are the 6 that fit best, or 6 evenly apart that are chosen without looking at times and held to the
other 5. *Beyond 128 MiB*: 256 MiB to 1 GiB from 6 knots below. *From other numbers of workers*: each number from the
curve of the nearest other one.
"""

NOT_PREDICTED = """
V100 hosts of this kind are a mesh: how many links a ring has depends on which workers are in it, so other numbers of
workers say little. Nor does the curve of one kind of host hold for another with the same devices. Those from several
hosts (Jean Zay) are one size each: a single knot gives them back, which shows nothing.
"""

PRODUCTS = """\
## Products of matrices

72 products in bfloat16 on an H100, 6 µs to 0.2 ms (OpenXLA's table for its own cost model): a rate, a start and the
share of the last wave that is waited for. *Held out*: constants from one half predict the other, ten halvings.
"""


def page(messages: Sequence[Row], products: Sequence[Row]) -> str:
    """The whole text."""
    ways = list(dict.fromkeys(row["way"] for row in messages))
    head = ("device", "way", "curves", "mean", "worst curve", "worst")
    lines = [line for way in ways for line in _lines(messages, way)]
    parts = [HEAD, MESSAGES, grid(head, lines), NOT_PREDICTED, PRODUCTS, _products(products), ""]
    return "\n".join(parts)


def _lines(rows: Sequence[Row], way: str) -> Iterator[tuple[object, ...]]:
    """One for each device."""
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if (row["device"], row["way"]) == (device, way)]
        if own:
            means = [float(row["mean"]) for row in own]
            worst = max(float(row["worst"]) for row in own)
            yield device, way, len(own), _percent(fmean(means)), _percent(max(means)), _percent(worst)


def _products(rows: Sequence[Row]) -> str:
    held_out = [row for row in rows if row["way"].startswith("held out")]
    lines = [
        (row["way"], row["products"], *_constants(row), _percent(float(row["mean"])), _percent(float(row["worst"])))
        for row in rows
        if row not in held_out
    ]
    means = [float(row["mean"]) for row in held_out]
    spread = f"{_percent(fmean(means))} ({_percent(min(means))} to {_percent(max(means))})"
    worst = _percent(max(float(row["worst"]) for row in held_out))
    lines.append(("held out", held_out[0]["products"], "", "", "", spread, worst))
    return grid(("way", "products", "TFLOP/s", "start, µs", "share of the last wave", "mean", "worst"), lines)


def _constants(row: Row) -> tuple[str, ...]:
    return f"{float(row['flops_per_s']) / 1e12:.0f}", f"{float(row['start_s']) * 1e6:.2f}", f"{float(row['waits']):.2f}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
