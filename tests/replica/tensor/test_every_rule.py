"""No rule without a case: each that is registered is tried, in each of its strategies, by a file of this folder."""

import importlib
from collections.abc import Iterator
from pathlib import Path

from paceline.replica.tensor import base
from paceline.replica.tensor.base import OpRule
from paceline.replica.tensor.rules.views import tuple_item
from tests.replica.tensor.cases import Case, rules

FOLLOWS = {tuple_item}
"""It takes an element as the tuple was made, and is tried in each case that gives a tuple."""


def cases() -> Iterator[Case]:
    for file in sorted(Path(__file__).parent.glob("test_rules_*.py")):
        module = importlib.import_module(f"tests.replica.tensor.{file.stem}")
        for held in vars(module).values():
            if isinstance(held, (list, tuple)):
                yield from (each for each in held if isinstance(each, Case))


def registered() -> set[OpRule]:
    assert rules.__path__, "importing it registers all"
    return set(base._RULES.values())


def test_each_has_a_case_that_divides() -> None:
    tried = {case.rule for case in cases() if not case.whole}
    missing = registered() - tried - FOLLOWS
    assert not missing, f"no Case in a test_rules_*.py is of {sorted(rule.strategies.__name__ for rule in missing)}"


def test_each_states_what_a_shard_owns() -> None:
    for rule in registered() - FOLLOWS:
        assert "S_p" in (rule.strategies.__doc__ or ""), rule.strategies.__name__
