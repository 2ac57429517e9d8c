"""A CSV file of measured rows that is whole after each of them."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, str]


class Sheet:
    """Rows by their keys; what is there is read, and a row that is put is at once on the disk.

    Args:
        path: of the file; it and its folder are made with the first row.
        keys: the columns that say which row it is.
    """

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        self.path, self._keys = path, tuple(keys)
        self._rows = {self._key(row): row for row in _read(path)}

    @property
    def rows(self) -> list[Row]:
        """All, oldest first."""
        return list(self._rows.values())

    def find(self, *key: object) -> Row | None:
        """The row of these keys, in their order."""
        return self._rows.get(tuple(map(str, key)))

    def put(self, row: Mapping[str, Any]) -> None:
        """Add a row, in place of the one that has its keys; the file is written beside and renamed."""
        told = {name: str(value) for name, value in row.items()}
        self._rows.pop(self._key(told), None)
        self._rows[self._key(told)] = told
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(told), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._rows.values())
        beside.replace(self.path)

    def drop(self, **wanted: str) -> None:
        """Forget the rows with these values; the file has them until the next one is put."""
        for key, row in list(self._rows.items()):
            if wanted.items() <= row.items():
                del self._rows[key]

    def _key(self, row: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(row[name] for name in self._keys)


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
