"""The SVG: well-formed, self-contained, true to scale, and small however many spans there are."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from paceline.core.errors import InputError
from paceline.trace.lanes import LOOKS, Stretch
from paceline.trace.spans import ACTIONS, SERVER, Action, Span
from paceline.trace.svg import boxes, swimlanes_svg

SVG = "{http://www.w3.org/2000/svg}"
CYCLE: list[Action] = ["pull", "forward", "backward", "push", "wait"]


def dense(count: int, replicas: int) -> list[Span]:
    """``count`` spans of one microsecond, back to back on each replica."""
    return [
        Span(replica, 0, 0, CYCLE[index % len(CYCLE)], index, 0, 1000 * index, 1000 * (index + 1), 0)
        for replica in range(replicas)
        for index in range(count // replicas)
    ]


def drawn(picture: str) -> dict[str, list[tuple[float, float]]]:
    """Start and width of each box, by its title."""
    found: dict[str, list[tuple[float, float]]] = {}
    for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            found.setdefault(str(title.text), []).append((float(rect.attrib["x"]), float(rect.attrib["width"])))
    return found


def words(picture: str) -> list[str]:
    return [str(each.text) for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_labels_legend_and_axis(synchronous: list[Span]) -> None:
    found = words(swimlanes_svg(synchronous))
    legend = ["forward", "backward", "pull", "push", "apply", "wait", "delay"]
    assert found[:7] == legend
    assert found[-3:] == ["replica 0", "replica 1", "server"]
    assert found[7:-3] == [f"{5 * tick} ms" for tick in range(8)]


def test_titles_tell_action_step_and_duration(synchronous: list[Span], pipeline: list[Span]) -> None:
    titles = drawn(swimlanes_svg(synchronous))
    assert {"forward · step 2 · 3.5 ms", "push · step 1 · 400 bytes · 1 ms", "apply · step 1 · 2 ms"} <= titles.keys()
    assert "forward · step 1 · micro-batch 2 · 1 ms" in drawn(swimlanes_svg(pipeline))


def test_boxes_are_true_to_scale(synchronous: list[Span]) -> None:
    found = drawn(swimlanes_svg(synchronous))
    (x_first, width), (x_second, _) = found["forward · step 1 · 3.5 ms"][0], found["forward · step 2 · 3.5 ms"][0]
    (_, longer), _ = found["backward · step 1 · 6 ms"]
    pixels_per_ms = (x_second - x_first) / 20
    assert width == pytest.approx(3.5 * pixels_per_ms, abs=0.7)
    assert longer == pytest.approx(6 * pixels_per_ms, abs=0.7)


def test_a_stretch_shows_what_lies_in_it(synchronous: list[Span]) -> None:
    found = drawn(swimlanes_svg(synchronous, start_s=0.0, end_s=0.02))
    assert all("step 1" in title for title in found)
    assert sum(len(places) for places in found.values()) == sum(each.step == 1 for each in synchronous)
    with pytest.raises(InputError, match="shows nothing"):
        swimlanes_svg(synchronous, start_s=1.0)


def test_it_needs_nothing_else(synchronous: list[Span]) -> None:
    picture = swimlanes_svg(synchronous)
    assert re.findall(r"https?://[^\"]*", picture) == ["http://www.w3.org/2000/svg"]
    assert set(re.findall(r"url\(#([^)]*)\)", picture)) == set(re.findall(r' id="([^"]*)"', picture))
    assert not re.search(r"<(script|style|image|link)", picture)


def test_all_lies_within_the_frame() -> None:
    every = [
        Span(r, 0, 0, action, 1, 0, 10 * i, 10 * i + 9, 0) for r in (0, SERVER) for i, action in enumerate(ACTIONS)
    ]
    root = ElementTree.fromstring(swimlanes_svg(every))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.attrib["viewBox"] == f"0 0 {width:g} {height:g}"
    for each in root.iter(f"{SVG}text"):
        half = 3.5 * len(str(each.text)) * (each.attrib.get("text-anchor") == "middle")
        assert float(each.attrib["x"]) - half >= 0
        assert float(each.attrib["x"]) + half <= width
        assert 0 < float(each.attrib["y"]) < height
    rows = {each.attrib["y"] for each in list(root.iter(f"{SVG}text"))[: len(ACTIONS)]}
    assert len(rows) == 2  # the legend of all actions is wider than the picture


def test_many_spans_stay_small() -> None:
    spans = dense(100_000, replicas=8)
    assert len(swimlanes_svg(spans)) < 300_000


def test_many_lanes_are_labelled_in_part() -> None:
    found = words(swimlanes_svg([*dense(1000, replicas=200), Span(SERVER, 0, 0, "apply", 1, 0, 0, 1000, 0)]))
    lanes = [each for each in found if each.startswith("replica")]
    assert lanes == [f"replica {index}" for index in range(0, 200, 5)]
    assert found[-1] == "server"


def test_narrow_spans_are_merged_and_wide_ones_are_not() -> None:
    spans = [
        Span(0, 0, 0, "forward", 1, 0, 0, 1000, 0),
        *(Span(0, 0, 0, "push" if i % 5 else "pull", i, 0, 1000 + 10 * i, 1010 + 10 * i, 0) for i in range(50)),
        Span(0, 0, 0, "wait", 1, 0, 1500, 2500, 0),
        Span(0, 0, 0, "apply", 7, 0, 3000, 3010, 0),
    ]
    found = boxes(spans, Stretch(0, 0, 4000), narrow_ns=100)
    assert [(box.start_ns, box.end_ns, box.action, box.spans) for box in found] == [
        (0, 1000, "forward", 1),
        (1000, 1500, "push", 50),
        (1500, 2500, "wait", 1),
        (3000, 3010, "apply", 1),
    ]
    assert found[1].title() == "50 spans in 500 ns: push 80%, pull 20%"
    assert found[3].title() == "apply · step 7 · 10 ns"


def test_merging_loses_no_time() -> None:
    spans = dense(5000, replicas=1)
    found = boxes(spans, Stretch(0, 0, 5_000_000), narrow_ns=2500)
    assert sum(box.spans for box in found) == 5000
    assert sum(sum(box.totals.values()) for box in found) == 5_000_000
    assert all(before.end_ns == after.start_ns for before, after in pairwise(found))


def test_every_action_has_its_own_colour() -> None:
    assert list(LOOKS) == list(ACTIONS)
    assert len({look.colour for look in LOOKS.values()}) == len(ACTIONS)


def test_no_spans() -> None:
    assert words(swimlanes_svg([])) == ["no spans"]
