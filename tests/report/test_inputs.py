"""What a report is about: grouping, labels, colours."""

from pathlib import Path

import pytest

from paceline.comparison import Comparison
from paceline.core.errors import InputError
from paceline.plots.curves import PALETTE
from paceline.report.inputs import Source, sections
from tests.report.plausible import ASYNCHRONOUS, SWITCHING, SYNCHRONOUS, comparison, run


def test_a_comparison_is_a_section_with_its_baseline() -> None:
    (found,) = sections([comparison(rounds=2, traced=False)])
    assert (found.program, found.engine, found.baseline) == ("digits", "local", ASYNCHRONOUS)
    assert [(g.strategy, len(g.runs)) for g in found.groups] == [(SYNCHRONOUS, 2), (ASYNCHRONOUS, 2), (SWITCHING, 2)]
    assert [g.label for g in found.groups] == ["synchronous", "asynchronous", "smooth-switch:every=300"]


def test_single_runs_of_one_program_are_one_section_and_equal_strategies_its_rounds() -> None:
    (found,) = sections([run(SWITCHING, 0), run(ASYNCHRONOUS, 0), run(SWITCHING, 1)])
    assert [(g.strategy, len(g.runs)) for g in found.groups] == [(SWITCHING, 2), (ASYNCHRONOUS, 1)]
    assert found.baseline is None


def test_folders_and_values_mix_and_a_strategy_keeps_its_colour(tmp_path: Path) -> None:
    comparison(rounds=1, traced=False).save(tmp_path / "c")
    run(SWITCHING, traced=False).save(tmp_path / "a")
    sources: list[Source] = [tmp_path / "a", str(tmp_path / "c"), run(ASYNCHRONOUS)]
    single, compared = sections(sources)
    assert [g.strategy for g in single.groups] == [SWITCHING, ASYNCHRONOUS]
    looks = {g.strategy: g.colour for g in single.groups}
    assert looks.items() <= {g.strategy: g.colour for g in compared.groups}.items()
    assert len({g.colour for g in compared.groups}) == 3


def test_with_more_strategies_than_colours_lines_differ() -> None:
    runs = {f"replicas={n}": [run()] for n in range(1, 16)}
    (found,) = sections([Comparison(runs, "replicas=1")])
    assert len({(g.colour, g.dash) for g in found.groups}) == 15
    assert {g.colour for g in found.groups} == set(PALETTE)


def test_strategies_without_a_complete_run_are_left_out() -> None:
    (found,) = sections([Comparison({ASYNCHRONOUS: [], SWITCHING: [run()]}, ASYNCHRONOUS)])
    assert ([g.strategy for g in found.groups], found.baseline) == ([SWITCHING], None)


def test_one_strategy_is_compared_with_nothing() -> None:
    (found,) = sections([Comparison({SWITCHING: [run()]}, SWITCHING)])
    assert ([g.strategy for g in found.groups], found.baseline) == ([SWITCHING], None)


def test_nothing_to_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one run"):
        sections([])
    with pytest.raises(InputError, match="interrupted"):
        sections([Comparison({ASYNCHRONOUS: []}, ASYNCHRONOUS)])
    with pytest.raises(InputError, match="no folder"):
        sections([tmp_path / "nowhere"])
