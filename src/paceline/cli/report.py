"""``paceline report``: one page about recorded runs and comparisons."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from paceline.cli.console import print_json, session, write_target
from paceline.cli.options import Json


def report(
    folders: Annotated[list[Path], Argument(metavar="DIR...", help="Folders of recorded runs or comparisons.")],
    *,
    html: Annotated[
        Path | None, Option(help="Where to write the page.", show_default="report.html in the first folder")
    ] = None,
    json: Json = False,
) -> None:
    """Write one self-contained page: curves, tables and swimlanes."""
    page = folders[0] / "report.html" if html is None else html
    with session(json_output=json):
        if html is not None:
            write_target("--html", html)
        from paceline.report import write_report

        write_report(folders, page)
    if json:
        print_json({"html": str(page)})
    else:
        echo(f"Report: {page}")
