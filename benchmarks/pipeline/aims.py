"""How close to the ideal a step is to be, how flat memory, and what isn't."""

from collections.abc import Iterator, Mapping, Sequence

from figure import fullest
from kit.sheet import Row
from sides import OURS

OF_IDEAL = {"large": 1.04, "small": 1.12}
"""By size, with 2 stages: step time / ideal, at most."""

BEFORE_TORCH = ("gpipe", "1f1b")
"""Schedules that are to be quicker than torch's, with 2 stages."""

FLAT = 1.01
"""What saves the same whatever m is: up to what a last micro-batch's loss adds."""


def times(rows: Sequence[Row]) -> Iterator[str]:
    """Lines about step times."""
    for row in rows:
        if row["side"] != OURS or row["stages"] != "2" or row["size"] not in OF_IDEAL:
            continue
        what = f"{row['size']}, {row['backend']}, {row['schedule']}"
        yield _line(f"{what}: of the ideal {row['of_ideal']}", float(row["of_ideal"]) <= OF_IDEAL[row["size"]])
        if row["schedule"] not in BEFORE_TORCH:
            continue
        for other, ratio in {"torch": row["of_torch"], "torch on gloo": row["of_torch_on_gloo"]}.items():
            if row["backend"] != "gloo" or other == "torch":
                yield _line(f"{what}: of {other} {ratio}", float(ratio) < 1)


def memory(rows: Sequence[Row]) -> Iterator[str]:
    """Lines about what is kept on the fullest stage."""
    for size, stages in sorted({(row["size"], row["stages"]) for row in rows}):
        mine = [row for row in rows if (row["size"], row["stages"]) == (size, stages)]
        kept = {way: fullest(mine, way) for way in ("gpipe", "1f1b", "gpipe, boundaries", "1f1b, boundaries")}
        # Under 1f1b the last stage's backward follows at once upon its forward: there is nothing to be forgotten.
        others = [row for row in mine if int(row["stage"]) < int(stages) - 1]
        kept |= {f"{way}, but the last": fullest(others, way) for way in ("1f1b", "1f1b, boundaries")}
        for line, met in _memory(kept):
            yield _line(f"{size}, {stages} stages: {line}", met)


def _memory(kept: Mapping[str, Mapping[int, int]]) -> Iterator[tuple[str, bool]]:
    if {8, 64} <= kept["1f1b"].keys() & kept["gpipe"].keys():
        flat, steep = (kept[way][64] / kept[way][8] for way in ("1f1b", "gpipe"))
        yield f"1f1b keeps {flat:.2f} times as much with m = 64 as with m = 8", flat <= FLAT
        yield f"gpipe keeps {steep:.2f} times as much with m = 64 as with m = 8", abs(steep / 8 - 1) <= FLAT - 1
    for name, where in (("gpipe", ""), ("1f1b", ", but the last")):
        without, recomputed = kept[f"{name}{where}"], kept[f"{name}, boundaries{where}"]
        shares = [recomputed[m] / without[m] for m in without.keys() & recomputed.keys()]
        if shares:
            what = f"{name} with recomputation, on every stage{where}"
            yield f"{what}, keeps at most {max(shares):.3f} of what it keeps without", max(shares) <= 0.5


def _line(words: str, met: bool) -> str:
    return words if met else f"{words} (missed)"
