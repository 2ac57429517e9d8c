"""Spans: what happened, when, on which worker; recorded, stored and drawn. No torch."""

from paceline.trace.perfetto import write_perfetto
from paceline.trace.recorder import AnyRecorder, NullRecorder, Recorder, read_packed
from paceline.trace.spans import ACTIONS, SERVER, Action, Span, read_spans, write_spans
from paceline.trace.step_view import Panel, panels_svg, panels_text
from paceline.trace.swimlane import svg, text

__all__ = [
    "ACTIONS",
    "SERVER",
    "Action",
    "AnyRecorder",
    "NullRecorder",
    "Panel",
    "Recorder",
    "Span",
    "panels_svg",
    "panels_text",
    "read_packed",
    "read_spans",
    "svg",
    "text",
    "write_perfetto",
    "write_spans",
]
