"""``paceline compare``: one program under several strategies, from the same start, under the same budget."""

from typing import Annotated

from typer import Option, echo

from paceline.cli.console import end, print_json, session
from paceline.cli.options import Json, ProgramName, Shared, with_shared


@with_shared
def compare(
    shared: Shared,
    program: ProgramName,
    *,
    strategy: Annotated[
        list[str], Option(help="A strategy to compare, as in train; give it once for each.", show_default=False)
    ],
    rounds: Annotated[int, Option(help="Repeat with seed, seed + 1, ...")] = 1,
    baseline: Annotated[
        str | None, Option(help="The strategy that differences are against.", show_default="the first")
    ] = None,
    json: Json = False,
) -> None:
    """Train PROGRAM under several strategies, from the same start and under the same budget."""
    with session(json_output=json):
        shared.refuse([*strategy, *([] if baseline is None else [baseline])], [program])
        from paceline.api.compare import compare
        from paceline.engine.run_context import is_main

        reporting = is_main(shared.engine)
        if shared.out is not None:  # before anything is trained: it needs an extra
            from paceline.report import write_report
        comparison = compare(shared.program(program), strategy, rounds=rounds, baseline=baseline, **shared.keywords())
        if shared.out is not None and reporting:
            write_report([shared.out], shared.out / "report.html")
    if json and reporting:
        print_json(comparison.to_json())
    elif reporting:
        echo(comparison.table(baseline=baseline))
        if shared.out is not None:
            echo(f"Report: {shared.out / 'report.html'}")
    end(interrupted=comparison.interrupted, signal=comparison.signal)
