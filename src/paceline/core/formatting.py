"""Format numbers for people: seconds and bytes, with units and three digits, and tables of them."""

import math
from collections.abc import Collection, Sequence

from paceline.core.types import Seconds

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def seconds_text(seconds: Seconds) -> str:
    """Format a duration with three digits.

    >>> seconds_text(0.0123456), seconds_text(61.25), seconds_text(2.5e-6), seconds_text(0.0)
    ('12.3 ms', '61.2 s', '2.5 µs', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e9)} ns" if abs(seconds) >= 5e-10 else "0 s"


def bytes_text(size: float) -> str:
    """Format a number of bytes in binary units.

    >>> bytes_text(3 * 2**30), bytes_text(1000), bytes_text(1536)
    ('3 GiB', '1000 B', '1.5 KiB')
    """
    unit = 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if not unit else f"{_three(size)} {_UNITS[unit]}"


def printable(text: str) -> str:
    r"""Return a text without what a terminal would obey: escape codes, other controls, changes of direction.

    >>> print(printable("\x1b[2J, \u202e"))
    \x1b[2J, \u202e
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _three(number: float) -> str:
    """Format three digits without an exponent.

    >>> _three(1234.5), _three(12.34), _three(3.0)
    ('1,234', '12.3', '3')
    """
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def amount(nbytes: int) -> str:
    """Format a number of bytes in decimal units, with three digits.

    >>> amount(0), amount(512), amount(49_152), amount(1_000_000), amount(2_345_678_901)
    ('0 B', '512 B', '49.2 kB', '1 MB', '2.35 GB')
    """
    step = min(3, int(math.log(max(nbytes, 1), 1000) + 1e-9))
    return f"{nbytes / 1000**step:.3g} {('B', 'kB', 'MB', 'GB')[step]}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Return one line per row, with columns as wide as their longest cell.

    Args:
        rows: cells, as many in each row; the first row has the titles.
        right: titles of the columns that are aligned to the right.

    >>> aligned([["name", "size"], ["a", "10"], ["long name", "7"]], right=["size"])
    ['name       size', 'a            10', 'long name     7']
    """
    columns = list(zip(*rows, strict=True))
    forms = [f"{'>' if column[0] in right else '<'}{max(map(len, column))}" for column in columns]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]
