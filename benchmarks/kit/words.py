"""How pages and the command line write tables and sizes."""

from collections.abc import Iterable, Sequence

UNITS = {"": 1, "K": 2**10, "M": 2**20}


def grid(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table.

    >>> print(grid(("a", "b"), [(1, 2)]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [head, *rows]
    texts = [f"| {' | '.join(map(str, cells))} |" for cells in lines]
    return "\n".join([texts[0], f"|{'---|' * len(head)}", *texts[1:]])


def size(text: str) -> int:
    """Bytes, from ``256K`` or ``4M``.

    >>> size("256K"), size("100")
    (262144, 100)
    """
    digits = text.rstrip("KM")
    return int(digits) * UNITS[text[len(digits) :]]


def size_text(nbytes: int) -> str:
    """A size with its unit.

    >>> size_text(262144), size_text(100 * 2**20), size_text(0)
    ('256 KiB', '100 MiB', '0 B')
    """
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def bullets(lines: Iterable[str]) -> str:
    """A list; "None." where there is nothing."""
    return "\n".join(f"- {line}" for line in lines) or "None."
