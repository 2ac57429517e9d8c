"""docs/tensor-parallelism.md says how operators are divided: its table is what is printed, and it leaves no way out."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline import Strategy, show_shards
from paceline.replica.tensor import rules

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "tensor-parallelism.md").read_text(encoding="utf-8")


def program(file: str = "words.py") -> Any:
    """One of the page, by the name of its file; the first one is that at the top."""
    [source] = re.findall(rf"^```python\n(# {re.escape(file)}\n.*?)^```", PAGE, re.M | re.S)
    named: dict[str, Any] = {"__name__": file.removesuffix(".py")}
    exec(source, named)
    return named["program"]


def ways() -> Iterator[str]:
    """The names that the rules give."""
    for file in Path(rules.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "OpStrategy":
                given = [*node.args[2:3], *(keyword.value for keyword in node.keywords if keyword.arg == "name")]
                yield from (str(each.value) for each in given if isinstance(each, ast.Constant))


def test_the_tables_are_what_is_printed() -> None:
    tables = re.findall(r"^```text (shards=.*?)\n(.*?)\n```$", PAGE, re.M | re.S)
    page = PAGE
    for file, (strategy, table) in zip(("words.py", "images.py"), tables, strict=True):
        page = page.replace(table, show_shards(program(file), strategy))
    if os.environ.get("PACELINE_REWRITE_GOLDENS") == "1":
        (DOCS / "tensor-parallelism.md").write_text(page, encoding="utf-8")
        return
    assert page == PAGE


def test_every_way_of_a_rule_is_named() -> None:
    found = set(ways())
    assert {"column", "row", "heads", "filters", "channels", "groups", "samples"} <= found
    assert found <= set(re.findall(r"`(\w+)`", PAGE))


def test_what_it_writes_by_hand_fits_its_program() -> None:
    [text] = re.findall(r'"(shards=2 shard_rules=\S+)"', PAGE)
    [in_python] = re.findall(r"`(Strategy\(shards=2, .*?\))`", PAGE)
    assert eval(in_python, {"Strategy": Strategy}) == Strategy.parse(text)
    assert "shard_rules say so" in show_shards(program(), text)


def test_options_that_it_names_are_those_of_a_strategy() -> None:
    named = set(re.findall(r"`(\w+)=[^`]*`", PAGE)) - {"engine"}
    assert {"shards", "device", "compression"} <= named <= set(Strategy.__dataclass_fields__)
