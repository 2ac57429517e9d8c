"""Which step is shown, what stands beside it, and the figures below."""

from dataclasses import replace

import pytest

from paceline.core.errors import InputError
from paceline.metrics.pipeline_step import pipeline_step
from paceline.schedule import StageTimes, parse, simulate
from paceline.strategy import Strategy
from paceline.trace.spans import SERVER, Span

MS = 10**6


def recorded(
    schedule: str, workers: int, micro_batches: int, slower: tuple[float, ...] = (1.0, 3.0, 2.0)
) -> list[Span]:
    """A step for each factor, that much slower than forward 1 ms and backward 2 ms; a gap and an update after each."""
    order, spans, at = parse(schedule), list[Span](), 0
    for step, factor in enumerate(slower, start=1):
        ms = StageTimes.equal(
            order.parts(workers), forward=1e-3 * factor, backward_input=1e-3 * factor, backward_weight=1e-3 * factor
        )
        step_spans = [moved(each, at, step) for each in simulate(order, ms, workers, micro_batches)]
        end = max(each.end_ns for each in step_spans)
        spans += [*step_spans, *(Span(0, w, 0, "apply", step, 0, end, end + MS, 0) for w in range(workers))]
        at = end + 5 * MS
    return spans


def moved(span: Span, by_ns: int, step: int) -> Span:
    return replace(span, start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns, step=step)


def test_a_step_of_median_length_is_shown_unless_another_is_asked_for() -> None:
    spans = recorded("gpipe", 2, 3)
    strategy = Strategy(stages=2, schedule="gpipe", micro_batches=3)
    typical, first = pipeline_step(spans, strategy), pipeline_step(spans, strategy, step=1)
    assert typical is not None
    assert first is not None
    assert (typical.step, typical.steps, first.step) == (3, 3, 1)
    # (3 + 1) · 3 units, and the update of 1 ms.
    assert (typical.measured.length_ns, first.measured.length_ns) == (25 * MS, 13 * MS)
    assert typical.measured.title == "measured, step 3: 25 ms"


def test_the_ideal_is_simulated_from_median_times_and_knows_no_update() -> None:
    found = pipeline_step(recorded("gpipe", 2, 3), Strategy(stages=2, schedule="gpipe", micro_batches=3))
    assert found is not None
    assert found.ideal.length_ns == 24 * MS
    assert found.ideal.title == "ideal, gpipe with 3 micro-batches: 24 ms"
    assert {span.action for span in found.ideal.spans} == {"forward", "backward"}
    assert (found.pace.step_s, found.pace.ideal_s) == (0.025, 0.024)


def test_panels_begin_with_0_and_hold_their_step_alone() -> None:
    spans = [
        *recorded("1f1b", 2, 4),
        Span(SERVER, 0, 0, "apply", 2, 0, 0, 10**9, 0),
        Span(0, 0, 0, "pull", 3, 0, 0, MS, 0),
    ]
    found = pipeline_step(spans, Strategy(stages=2, micro_batches=4), step=2)
    assert found is not None
    assert {span.step for span in found.measured.spans} == {2}
    assert min(span.start_ns for span in found.measured.spans) == 0
    assert max(span.end_ns for span in found.measured.spans) == found.measured.length_ns


def test_the_ideal_on_the_clock_of_the_run_begins_with_the_step() -> None:
    spans = recorded("1f1b", 2, 4)
    found = pipeline_step(spans, Strategy(stages=2, micro_batches=4), step=2)
    assert found is not None
    began = min(span.start_ns for span in spans if span.step == 2)
    assert min(span.start_ns for span in found.ideal_spans()) == began


def test_of_a_stream_a_step_is_shown_with_what_overlaps_it() -> None:
    """Three mini-batches of 4 that pass through two stages without a pause."""
    whole = simulate(
        parse("pipedream"), StageTimes.equal(2, forward=1e-3, backward_input=1e-3, backward_weight=1e-3), 2, 12
    )
    spans = [
        replace(
            s,
            step=1 + s.micro_batch // 4,
        )
        for s in whole
    ]
    found = pipeline_step(spans, Strategy(stages=2, schedule="pipedream", micro_batches=4), step=2)
    assert found is not None
    assert {span.step for span in found.measured.spans} == {1, 2, 3}
    assert sorted(map(shown, found.measured.spans)) == sorted(map(shown, found.ideal.spans))
    assert found.measured.length_ns == found.ideal.length_ns
    assert found.pace.ratio == 1


def shown(span: Span) -> tuple[int, str, int, int, int]:
    return span.stage, span.action, span.micro_batch, span.start_ns, span.end_ns


def test_figures_of_each_stage_and_their_means() -> None:
    spans = recorded("gpipe", 2, 3, slower=(1.0,))
    found = pipeline_step(
        spans, Strategy(stages=2, schedule="gpipe", micro_batches=3), {"peak_saved_bytes": [49_152, None]}
    )
    assert found is not None
    assert found.table() == [
        ("stage", "utilisation", "bubble", "exposed communication", "peak activations"),
        ("0", "69.2 %", "23.1 %", "0 ns", "49.2 kB"),
        ("1", "69.2 %", "23.1 %", "0 ns", ""),
        ("mean", "69.2 %", "23.1 %", "0 ns", ""),
    ]
    assert found.sentence() == "step time, median of 1: 13 ms; ideal: 12 ms; measured / ideal: 1.08"
    stages = found.to_json()["stages"]
    assert [stage["peak_saved_bytes"] for stage in stages] == [49_152, None]
    assert stages[1]["utilisation"] == pytest.approx(9 / 13)


def test_where_no_memory_was_counted_there_is_no_column_for_it() -> None:
    found = pipeline_step(recorded("gpipe", 2, 3), Strategy(stages=2, schedule="gpipe", micro_batches=3))
    assert found is not None
    assert {len(line) for line in found.table()} == {4}


def test_text_and_picture_say_the_same() -> None:
    found = pipeline_step(
        recorded("1f1b", 2, 4), Strategy(stages=2, micro_batches=4), {"peak_saved_bytes": [1000, 2000]}
    )
    assert found is not None
    for drawn in (found.text(80), found.svg()):
        for words in (found.measured.title, found.ideal.title, found.sentence(), "exposed communication", "2 kB"):
            assert words in drawn


@pytest.mark.parametrize("strategy", [Strategy(replicas=2), "replicas=2 aggregation=my-own"])
def test_what_is_no_pipeline_has_no_step(strategy: Strategy | str) -> None:
    assert pipeline_step(recorded("1f1b", 2, 4), strategy) is None


@pytest.mark.parametrize("kept", [0, 3])
def test_a_run_without_a_whole_step_has_none(kept: int) -> None:
    assert pipeline_step(recorded("1f1b", 2, 4)[:kept], Strategy(stages=2, micro_batches=4)) is None


def test_a_step_that_was_not_recorded_is_refused() -> None:
    with pytest.raises(InputError, match="step=9, but the run has steps 1 to 3; write step=3"):
        pipeline_step(recorded("1f1b", 2, 4), Strategy(stages=2, micro_batches=4), step=9)
