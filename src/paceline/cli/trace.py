"""``paceline trace``: the swimlanes of a recorded run."""

import shutil
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, echo

from paceline.cli.console import print_json, session, write_target, writing
from paceline.cli.options import Json
from paceline.core.errors import InputError

# Least width of a pipeline's lanes in characters, and width of their labels.
LEAST_WIDTH, GUTTER = 60, 16


def trace(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a run recorded with --trace.")],
    *,
    svg: Annotated[Path | None, Option(help="Draw the swimlanes into this file.")] = None,
    perfetto: Annotated[Path | None, Option(help="Write a trace for ui.perfetto.dev into this file.")] = None,
    step: Annotated[int | None, Option(help="Of a pipeline: which step.", show_default="one of median length")] = None,
    start: Annotated[float | None, Option(help="Draw all from this second of the run on.")] = None,
    end: Annotated[float | None, Option(help="Draw all up to this second of the run.")] = None,
    json: Json = False,
) -> None:
    """Draw the actions of each worker of a recorded run, a pipeline's step next to its ideal; by default as text."""
    with session(json_output=json):
        for option, path in (("--svg", svg), ("--perfetto", perfetto)):
            if path is not None:
                write_target(option, path)
        # Imported here: torch takes seconds, and --help needs none of it.
        from paceline.metrics.pipeline_step import pipeline_step
        from paceline.run import load
        from paceline.trace.perfetto import write_perfetto
        from paceline.trace.svg import swimlanes_svg
        from paceline.trace.text import swimlanes_text

        loaded = load(run)
        spans = loaded.spans
        if not spans:
            raise InputError(f"{run} holds no spans; record the run with --trace")
        whole = start is not None or end is not None
        if whole and step is not None:
            raise InputError(f"--step {step} is one step, --start and --end are a part of the run; write one of them")
        shown = None if whole else pipeline_step(spans, loaded.strategy, loaded.summary, step=step)
        if step is not None and shown is None:
            raise InputError(
                f"--step {step} shows a step of a pipeline, but {loaded.strategy} has no stages, or no whole step was "
                "recorded; leave --step out"
            )
        if svg is not None:
            drawing = shown.svg() if shown else swimlanes_svg(spans, start_s=start, end_s=end)
            with writing("--svg", svg):
                svg.write_text(drawing, encoding="utf-8")
        if perfetto is not None:
            with writing("--perfetto", perfetto):
                write_perfetto(perfetto, spans, shown.ideal_spans() if shown else ())
        text = ""
        if svg is None and perfetto is None and not json:
            width = max(LEAST_WIDTH, shutil.get_terminal_size().columns - GUTTER)
            text = shown.text(width) if shown else swimlanes_text(spans, start_s=start, end_s=end)
    if json:
        files: dict[str, Any] = {"spans": len(spans), "svg": svg and str(svg), "perfetto": perfetto and str(perfetto)}
        print_json(files | ({"pipeline": shown.to_json()} if shown else {}))
    else:
        echo(text, nl=False)
