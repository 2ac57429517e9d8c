"""``paceline checkpoints``: list the checkpoints of a run, and verify them."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, echo
from typer.core import TyperGroup

from paceline.cli.console import FAILED, print_json, session
from paceline.cli.options import Json
from paceline.core.formatting import aligned, amount


class ListByDefault(TyperGroup):
    """Takes a first word that is no command for the folder to list: ``paceline checkpoints ckpt``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command in front that is left out."""
        known = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if known else ["list", *args])


app = typer.Typer(cls=ListByDefault, no_args_is_help=True, help="List and verify checkpoints.")


@app.command("list")
def list_checkpoints(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder that --checkpoint named.")],
    *,
    json: Json = False,
) -> None:
    """List the checkpoints in a folder, the newest first, and verify each; exit with 1 if one is damaged."""
    with session(json_output=json):
        # Imported here: torch takes seconds, and --help needs none of it.
        from paceline.checkpoint.reader import statuses

        found = statuses(folder)
    if json:
        print_json({"checkpoints": [status._asdict() | {"folder": str(status.folder)} for status in found]})
    elif not found:
        echo(f"no checkpoints in {folder}")
    else:
        rows = [(str(s.version), s.created or "", amount(s.size_bytes), s.error or "sound") for s in found]
        echo("\n".join(aligned([("version", "created", "size", "state"), *rows], right=("version", "size"))))
    if any(status.error for status in found):
        raise typer.Exit(FAILED)
