"""``paceline scale``: add replicas to a run while it lasts, or take some away."""

from pathlib import Path
from typing import Annotated

from typer import Argument, echo

from paceline.cli.console import print_json, session
from paceline.cli.options import Json
from paceline.core.errors import InputError


def scale(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a run that is under way: its --out.")],
    replicas: Annotated[str, Argument(metavar="replicas=N", help="How many there are to be, within the run's bounds.")],
    *,
    json: Json = False,
) -> None:
    """Add replicas to a run while it lasts, or take some away: paceline scale runs/a replicas=6.

    The run was started with bounds, --strategy "replicas=2..8". New replicas begin with the parameters as they are;
    those that leave finish the step that they are at. Nobody waits for either.
    """
    with session(json_output=json):
        name, equals, number = replicas.partition("=")
        if name != "replicas" or not equals or not number.isdecimal():
            raise InputError(f"{replicas!r} is no number of replicas; write replicas=6")
        # Imported here: torch takes seconds, and --help needs none of it.
        from paceline.engine.scaling import scale as request

        answer = request(run, int(number))
    if json:
        print_json({"replicas": answer.replicas, "before": answer.before})
    else:
        echo(f"{answer.before} replicas -> {answer.replicas}")
