"""Spans as Chrome trace events, for ui.perfetto.dev and chrome://tracing."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline.core.safe_files import replacing
from paceline.trace.spans import PASSES, SERVER, Span


def write_perfetto(path: str | os.PathLike[str], spans: Iterable[Span], ideal: Sequence[Span] = ()) -> None:
    """Write a trace in Chrome's JSON format; the file appears whole or not at all.

    A process per replica (pid = replica; the server, which Perfetto would refuse as -1, comes after the last), a thread
    per worker of it, times in microseconds since the first span. Source: "Trace Event Format", Chromium project.

    Args:
        path: of the file.
        spans: of one run.
        ideal: spans of an ideal step of a pipeline on the same clock: a process after all others. With it
            micro-batches are named.
    """
    with replacing(path) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for index, event in enumerate(events(spans, ideal)):
            file.write((",\n" if index else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def events(spans: Iterable[Span], ideal: Sequence[Span] = ()) -> Iterator[dict[str, Any]]:
    """Yield the trace events: names of processes and threads first, then one complete event ("X") per span."""
    spans = list(spans)
    # Process ids must not be negative: the server comes after the last replica, an ideal after the server.
    server = max((span.replica for span in spans), default=SERVER) + 1
    placed = [(server if span.replica == SERVER else span.replica, span) for span in spans]
    placed += [(server + 1, span) for span in ideal]
    workers = sorted({(pid, span.stage, span.shard) for pid, span in placed})
    tids = {worker: tid for tid, worker in enumerate(workers, start=1)}  # apart everywhere: Perfetto wants that
    for pid in sorted({pid for pid, _, _ in workers}):
        name = {server: "server", server + 1: "ideal"}.get(pid, f"replica {pid}")
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for (pid, stage, shard), tid in tids.items():
        name = f"stage {stage} shard {shard}"
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    origin_ns = min((span.start_ns for span in spans), default=0)
    for pid, span in placed:
        name = f"{span.action} {span.micro_batch}" if ideal and span.action in PASSES else span.action
        yield {
            "ph": "X",
            "name": name,
            "cat": span.action,
            "pid": pid,
            "tid": tids[pid, span.stage, span.shard],
            "ts": (span.start_ns - origin_ns) / 1000,
            "dur": span.duration_ns / 1000,
            "args": {"step": span.step, "micro_batch": span.micro_batch, "bytes": span.bytes},
        }
