"""A trace that Perfetto and Chrome accept."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.trace.perfetto import write_perfetto
from paceline.trace.spans import SERVER, Span


def load(path: Path, spans: list[Span]) -> list[dict[str, Any]]:
    write_perfetto(path, spans)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace.keys() == {"displayTimeUnit", "traceEvents"}
    return list(trace["traceEvents"])


def test_one_complete_event_per_span(tmp_path: Path, synchronous: list[Span]) -> None:
    events = [event for event in load(tmp_path / "trace.json", synchronous) if event["ph"] == "X"]
    assert len(events) == len(synchronous)
    assert events[0] == {
        "ph": "X",
        "name": "pull",
        "cat": "pull",
        "pid": 1,
        "tid": 2,
        "ts": 0.0,
        "dur": 500.0,
        "args": {"step": 1, "micro_batch": 0, "bytes": 400},
    }
    last = synchronous[-1]
    assert events[-1]["ts"] == pytest.approx((last.start_ns - 10**9) / 1000)


def test_processes_are_replicas_and_the_server_comes_last(tmp_path: Path, synchronous: list[Span]) -> None:
    events = load(tmp_path / "trace.json", synchronous)
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert [named[pid] for pid in sorted(order, key=order.__getitem__)] == ["replica 0", "replica 1", "server"]
    applied = {event["pid"] for event in events if event["name"] == "apply"}
    assert [named[pid] for pid in applied] == ["server"]


def test_threads_are_workers(tmp_path: Path, pipeline: list[Span]) -> None:
    events = load(tmp_path / "trace.json", [*pipeline, Span(SERVER, 1, 0, "apply", 1, 0, 0, 5, 0)])
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {(0, 1): "stage 0 shard 0", (0, 2): "stage 1 shard 0", (1, 3): "stage 1 shard 0"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == named.keys()


def test_no_span_is_still_a_trace(tmp_path: Path) -> None:
    assert load(tmp_path / "trace.json", []) == []


def test_an_ideal_is_a_process_after_all_others(tmp_path: Path, pipeline: list[Span]) -> None:
    write_perfetto(tmp_path / "trace.json", [*pipeline, Span(SERVER, 0, 0, "apply", 1, 0, 0, 5, 0)], pipeline[:3])
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    named = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert named == {"replica 0": 0, "server": 1, "ideal": 2}
    assert [e["name"] for e in events if e["ph"] == "X" and e["pid"] == 2] == ["forward 0", "forward 1", "forward 2"]
    assert {"backward 2", "wait"} <= {event["name"] for event in events if event["pid"] == 0}
