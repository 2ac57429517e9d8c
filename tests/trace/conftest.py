"""Spans to draw, and texts to compare with: ``PACELINE_REWRITE_GOLDENS=1`` writes these anew."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.trace.spans import SERVER, Action, Span

MS = 10**6
Golden = Callable[[str, str], None]


def span(replica: int, action: Action, start_ms: float, end_ms: float, step: int = 1, **fields: int) -> Span:
    """A span of a worker that is a whole replica, times in milliseconds."""
    values = {"stage": 0, "shard": 0, "micro_batch": 0, "bytes": 0} | fields
    return Span(
        replica=replica, action=action, step=step, start_ns=int(start_ms * MS), end_ns=int(end_ms * MS), **values
    )


@pytest.fixture
def golden() -> Golden:
    """Compares a text with the file of a name in ``goldens``."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "goldens" / name
        if os.environ.get("PACELINE_REWRITE_GOLDENS") == "1":
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def synchronous() -> list[Span]:
    """Two rounds of two replicas, one of them slow, on a clock that began long ago."""
    spans: list[Span] = []
    for step, begin in ((1, 1000.0), (2, 1020.0)):
        for replica, delay in ((1, 6.0), (0, 0.0)):
            parts: list[tuple[Action, float]] = [
                ("pull", 0.5), ("forward", 3.5), ("backward", 6), ("delay", delay), ("push", 1), ("wait", 8 - delay)
            ]  # fmt: skip
            at = begin
            for action, length in parts:
                if length:
                    spans.append(span(replica, action, at, at + length, step, bytes=400 * (action in ("pull", "push"))))
                at += length
        spans.append(span(SERVER, "apply", begin + 17, begin + 19, step))
    return spans


@pytest.fixture
def pipeline() -> list[Span]:
    """All forward, all backward, on two stages with three micro-batches; a forward takes 1 ms, a backward 2."""
    return [
        *(
            span(0, "forward", stage + i, stage + i + 1, stage=stage, micro_batch=i)
            for stage in (0, 1)
            for i in range(3)
        ),
        *(
            span(0, "backward", 4 + 2 * (1 - stage + i), 6 + 2 * (1 - stage + i), stage=stage, micro_batch=2 - i)
            for stage in (0, 1)
            for i in range(3)
        ),
        span(0, "wait", 3, 6, stage=0),
    ]
