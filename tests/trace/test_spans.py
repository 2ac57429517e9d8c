"""Spans survive their file, and a damaged file is refused by line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.safe_files import replacing
from paceline.trace.spans import ACTIONS, Span, read_spans, write_spans

numbers = st.integers(0, 2**62)
spans = st.builds(
    lambda replica, stage, shard, action, step, micro_batch, start, length, size: Span(
        replica, stage, shard, action, step, micro_batch, start, start + length, size
    ),
    st.integers(-1, 2000),
    *(st.integers(0, 64), st.integers(0, 64), st.sampled_from(ACTIONS), numbers, st.integers(0, 64)),
    *(numbers, numbers, numbers),
)
GOOD: dict[str, Any] = {
    "replica": 0, "stage": 0, "shard": 0, "action": "wait", "step": 1, "micro_batch": 0, "start_ns": 5, "end_ns": 9,
    "bytes": 0,
}  # fmt: skip


@given(st.lists(spans, max_size=5))
def test_reading_undoes_writing(tmp_path_factory: pytest.TempPathFactory, written: list[Span]) -> None:
    path = tmp_path_factory.mktemp("spans") / "spans.jsonl"
    write_spans(path, written)
    assert read_spans(path) == written


def test_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    write_spans(path, [Span(**GOOD), Span(**GOOD)])
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [GOOD, GOOD]
    assert list(json.loads(lines[0])) == list(GOOD)


def test_a_failed_writing_leaves_what_was_there(tmp_path: Path) -> None:
    def failing() -> Iterator[Span]:
        yield Span(**GOOD)
        raise RuntimeError("no more")

    path = tmp_path / "spans.jsonl"
    write_spans(path, [Span(**GOOD)])
    with pytest.raises(RuntimeError, match="no more"):
        write_spans(path, failing())
    assert read_spans(path) == [Span(**GOOD)]
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_seen_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    with replacing(path) as file:
        file.write("half")
        assert not path.exists()
    assert path.read_text() == "half"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"spans\.jsonl:2 is no JSON"),
        ("", r"spans\.jsonl:2 is no JSON"),
        ("[1]", r"spans\.jsonl:2 is no span; write one JSON object a line, with the keys replica, stage"),
        (json.dumps({key: GOOD[key] for key in list(GOOD)[1:]}), r"spans\.jsonl:2 is no span"),
        (json.dumps(GOOD | {"colour": 1}), r"spans\.jsonl:2 is no span"),
        (json.dumps(GOOD | {"action": "sleep"}), r"spans\.jsonl:2: unknown action 'sleep'; write one of: .*forward"),
        (json.dumps(GOOD | {"action": ["wait"]}), r"spans\.jsonl:2: unknown action"),
        (json.dumps(GOOD | {"step": 1.5}), r"spans\.jsonl:2: step=1.5 is no whole number"),
        (json.dumps(GOOD | {"bytes": True}), r"spans\.jsonl:2: bytes=True is no whole number"),
        (json.dumps(GOOD | {"end_ns": 4}), r"spans\.jsonl:2: end_ns=4 is before start_ns=5"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(InputError, match=message):
        read_spans(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.jsonl is missing"):
        read_spans(tmp_path / "nothing.jsonl")
