"""``paceline trace``: the swimlanes of a recorded run."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from paceline.cli.options import Json
from paceline.cli.session import print_json, session, write_target
from paceline.core.errors import InputError


def trace(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a run recorded with --trace.")],
    *,
    svg: Annotated[Path | None, Option(help="Draw the swimlanes into this file.")] = None,
    perfetto: Annotated[Path | None, Option(help="Write a trace for ui.perfetto.dev into this file.")] = None,
    start: Annotated[float | None, Option(help="Draw from this second of the run on.")] = None,
    end: Annotated[float | None, Option(help="Draw up to this second of the run.")] = None,
    json: Json = False,
) -> None:
    """Draw who did what when in a recorded run; without options, as text."""
    with session(json_output=json):
        from paceline.run import load
        from paceline.trace import swimlane
        from paceline.trace.perfetto import write_perfetto

        spans = load(run).spans
        if not spans:
            raise InputError(f"{run} holds no spans; record the run with --trace")
        if svg is not None:
            write_target("--svg", svg).write_text(swimlane.svg(spans, start_s=start, end_s=end), encoding="utf-8")
        if perfetto is not None:
            write_perfetto(write_target("--perfetto", perfetto), spans)
        drawn = swimlane.text(spans, start_s=start, end_s=end) if svg is None and perfetto is None else ""
    if json:
        print_json({"spans": len(spans), "svg": svg and str(svg), "perfetto": perfetto and str(perfetto)})
    else:
        typer.echo(drawn, nl=False)
