"""No engine names another engine's module: neither in an import, which the import contract forbids, nor in a string."""

import ast
from pathlib import Path

import pytest

import paceline.engine
from paceline.engine import ENGINES

ROOT = Path(paceline.engine.__path__[0])


@pytest.mark.parametrize("name", sorted(ENGINES.modules))
def test_no_string_of_an_engine_names_a_module_of_another_one(name: str) -> None:
    others = [f"paceline.engine.{other}" for other in ENGINES.modules if other != name]
    files = sorted((ROOT / name).rglob("*.py"))
    assert files
    for file in files:
        strings = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
        found = [s for s in strings if isinstance(s, str) and any(other in s for other in others)]
        assert not found, f"{file}: {found}"
