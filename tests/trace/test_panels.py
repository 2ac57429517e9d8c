"""A step above what it might have been: to one scale, with the numbers of micro-batches."""

from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from paceline.trace.lanes import LOOKS, Panel
from paceline.trace.spans import Span
from paceline.trace.svg import panels_svg
from paceline.trace.text import panels_text
from tests.trace.conftest import span
from tests.trace.test_picture import SVG, drawn, words

MS = 10**6
TABLE = [("stage", "utilisation"), ("0", "60.0 %"), ("1", "75.0 %")]


@pytest.fixture
def panels(pipeline: list[Span]) -> list[Panel]:
    """The pipeline in 15 ms, with an update at its end, and in the 12 ms that it needs."""
    late = [span(0, "recompute", 12, 13.5, stage=0, micro_batch=2), span(0, "apply", 13.5, 15, stage=0)]
    return [Panel("measured, step 7: 15 ms", [*pipeline, *late], 15 * MS), Panel("ideal: 12 ms", pipeline, 12 * MS)]


def test_panels_in_characters(panels: list[Panel], golden: Callable[[str, str], None]) -> None:
    golden("panels.txt", panels_text(panels, width=60))


def test_numbers_that_do_not_fit_are_left_out(panels: list[Panel], golden: Callable[[str, str], None]) -> None:
    golden("panels-narrow.txt", panels_text(panels, width=15))


def test_a_shorter_panel_ends_where_it_does(panels: list[Panel]) -> None:
    lines = panels_text(panels, width=60).splitlines()
    assert [line.index("|", line.index("|") + 1) for line in lines if line.startswith("stage")] == [69, 69, 57, 57]


def test_shards_are_lanes_of_their_own() -> None:
    spans = [span(0, "forward", 0, 1, stage=1, shard=shard) for shard in (0, 1)]
    assert [lane.label for lane in Panel("", spans, MS).lanes()] == ["stage 1.0", "stage 1.1"]


def test_boxes_hold_the_numbers_of_their_micro_batches(panels: list[Panel]) -> None:
    found = words(panels_svg(panels, "15 ms", TABLE))
    assert found.count("0") == found.count("1") == 2 * 4 + 1  # forward and backward on two stages, and the table's
    assert found.count("2") == 2 * 4 + 1  # and its recomputation
    assert "forward · step 1 · micro-batch 0 · 1 ms" in drawn(panels_svg(panels, "", TABLE))


def test_narrow_boxes_hold_no_number() -> None:
    spans = [span(0, "forward", i, i + 1, micro_batch=i % 10) for i in range(400)]
    assert not {"3", "7"} & set(words(panels_svg([Panel("", spans, 400 * MS)], "", TABLE)))


def test_numbers_stand_in_the_middle_of_their_boxes(panels: list[Panel]) -> None:
    root = ElementTree.fromstring(panels_svg(panels, "", TABLE))
    lane = next(group for group in root.findall(f"{SVG}g"))
    middles = [float(r.attrib["x"]) + float(r.attrib["width"]) / 2 for r in lane.iter(f"{SVG}rect")]
    for each in lane.findall(f"{SVG}text"):
        # Boxes are half a pixel narrower than their time, so their middles are a quarter off.
        assert min(abs(float(each.attrib["x"]) - middle) for middle in middles) < 0.4


def test_both_panels_have_one_scale(panels: list[Panel]) -> None:
    found = drawn(panels_svg(panels, "", TABLE))
    places = found["backward · step 1 · micro-batch 0 · 2 ms"]
    assert len(places) == 4
    assert len({x for x, _ in places}) == 2  # one a stage, the same in both panels
    assert len({width for _, width in places}) == 1


def test_forward_and_backward_are_told_apart_by_colour(panels: list[Panel]) -> None:
    root = ElementTree.fromstring(panels_svg(panels, "", TABLE))
    colours = {
        str(title.text).split(" ·")[0]: group.attrib["fill"]
        for group in root.iter(f"{SVG}g")
        if "fill" in group.attrib
        for title in group.iter(f"{SVG}title")
    }
    assert colours == {name: LOOKS[name].colour for name in ("forward", "backward", "recompute", "apply", "wait")}


def test_titles_sentence_and_table_lie_within_the_frame(panels: list[Panel]) -> None:
    picture = panels_svg(panels, "step time: 15 ms", TABLE)
    assert {"measured, step 7: 15 ms", "ideal: 12 ms", "step time: 15 ms", "utilisation", "75.0 %"} <= set(
        words(picture)
    )
    root = ElementTree.fromstring(picture)
    assert root.attrib["aria-label"] == "measured, step 7: 15 ms; ideal: 12 ms"
    assert all(0 < float(each.attrib["y"]) < float(root.attrib["height"]) for each in root.iter(f"{SVG}text"))
