"""The page: tables of what was measured, and what is slower than Gloo or than it is to be."""

from collections.abc import Iterator, Sequence

from aims import AIMS, missed
from calls import BARRIER, CALLS
from kit.machine import described
from kit.sheet import Row
from kit.words import bullets, grid, size_text

HEAD = """\
# Backend `shm` beside Gloo: every collective

    python benchmarks/collectives/measure.py
    python benchmarks/collectives/measure.py --page

The first command measures what is not yet in `results/collectives.csv` (`--again`: all anew; `--quick`: a few sizes,
two minutes); the second writes this page from it.

Both backends have a group of the same processes, of one thread each, and take turns. A turn is several calls in a row,
as many as fit into about {turn_ms} ms, and its time the mean of them on the slowest rank. A figure is the median of all
turns, a ratio the median of the pairs': Gloo's time by shm's, so above 1 shm is quicker. Before it is timed, each call
is checked once on each backend, on each rank, element by element, against the exact result.

Size is that of the largest tensor of a rank, float32: what each rank gives and gets in `all_reduce`, `broadcast`,
`reduce` and `send and back`; what the root has of all ranks together in `gather` and `scatter`; all parts together in
the others. So with P ranks a part is size / P. `send and back` goes from the first rank to the last and returns.

Machine: {machine}. {pairs} pairs each.
"""


def page(rows: Sequence[Row]) -> str:
    """The whole text."""
    return "\n".join(
        [
            HEAD.format(turn_ms=_span(rows, "turn_ms"), machine=described(rows), pairs=_span(rows, "pairs")),
            *(_table(rows, ranks) for ranks in sorted({int(row["ranks"]) for row in rows})),
            _barriers(rows),
            _slower(rows),
            _below(rows),
        ]
    )


def _span(rows: Sequence[Row], column: str) -> str:
    """What rows say of how they were measured: one number, or from and to."""
    values = sorted({row[column] for row in rows}, key=float)
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _table(rows: Sequence[Row], ranks: int) -> str:
    mine = {(row["call"], int(row["bytes"])): row for row in rows if int(row["ranks"]) == ranks}
    sizes = sorted({nbytes for call, nbytes in mine if call != BARRIER})
    lines = [
        (f"`{call}`", *(_cell(mine.get((call, nbytes))) for nbytes in sizes))
        for call in CALLS
        if any((call, nbytes) in mine for nbytes in sizes)
    ]
    if not lines:
        return ""
    head = f"## {ranks} ranks\n\nRatio (µs of shm : µs of Gloo).\n\n"
    return head + grid(("call", *map(size_text, sizes)), lines) + "\n"


def _barriers(rows: Sequence[Row]) -> str:
    found = sorted((row for row in rows if row["call"] == BARRIER), key=lambda row: int(row["ranks"]))
    if not found:
        return ""
    return "## `barrier`\n\n" + grid(("ranks", "ratio (µs of shm : µs of Gloo)"), _counted(found)) + "\n"


def _counted(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    for row in rows:
        yield row["ranks"], _cell(row)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"**{float(row['ratio']):.2f}** ({_us(row['shm_us'])} : {_us(row['gloo_us'])})"


def _us(text: str) -> str:
    value = float(text)
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _slower(rows: Sequence[Row]) -> str:
    slower = [str(row) for row in missed(rows) if float(row.row["ratio"]) < 1]
    return f"## Slower than Gloo: {len(slower)} of {len(rows)} rows\n\n{bullets(slower)}\n"


def _below(rows: Sequence[Row]) -> str:
    below = [str(row) for row in missed(rows) if float(row.row["ratio"]) >= 1]
    return f"## Below the aims: {len(below)} more\n\nThe aims: {AIMS}.\n\n{bullets(below)}\n"
