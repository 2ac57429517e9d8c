"""``paceline checkpoints``: list the checkpoints of a run, verify them, export and import them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option, echo
from typer.core import TyperGroup

from paceline.cli.console import FAILED, print_json, session
from paceline.cli.options import Json
from paceline.core.errors import InputError
from paceline.core.formatting import aligned, amount, printable

if TYPE_CHECKING:
    from paceline.checkpoint.interop import Transfer

Progress = Annotated[
    bool | None,
    Option(
        "--progress/--no-progress",
        help="Show progress on stderr; by default if it is a terminal.",
        show_default=False,
    ),
]


class ListByDefault(TyperGroup):
    """Takes a first word that is no command for the folder to list: ``paceline checkpoints ckpt``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command in front that is left out."""
        known = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if known else ["list", *args])


app = typer.Typer(cls=ListByDefault, no_args_is_help=True, help="List, verify, export and import checkpoints.")


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
        rows = [
            (str(s.version), printable(s.created or ""), amount(s.size_bytes), printable(s.error or "sound"))
            for s in found
        ]
        echo("\n".join(aligned([("version", "created", "size", "state"), *rows], right=("version", "size"))))
    if any(status.error for status in found):
        raise typer.Exit(FAILED)


@app.command("export")
def export_checkpoint(
    folder: Annotated[
        Path, Argument(metavar="DIR", help="Folder that --checkpoint named, for its newest sound one; or DIR/step-N.")
    ],
    *,
    safetensors: Annotated[
        Path | None,
        Option(metavar="OUT", help="New folder for parameters and buffers, as Hugging Face reads them."),
    ] = None,
    dcp: Annotated[
        Path | None,
        Option(metavar="OUT", help="New folder for model and optimizer, as torch.distributed.checkpoint reads them."),
    ] = None,
    progress: Progress = None,
    json: Json = False,
) -> None:
    """Verify a checkpoint of DIR, and write it in another format."""
    with session(json_output=json):
        from paceline.progress import measuring

        if (safetensors is None) == (dcp is None):
            raise InputError("export takes one format; write either --safetensors OUT or --dcp OUT")
        with measuring(progress, "export") as report:
            if safetensors is not None:
                from paceline.checkpoint.interop_safetensors import export_safetensors

                done = export_safetensors(folder, safetensors, report=report)
            elif dcp is not None:
                from paceline.checkpoint.interop_dcp import export_dcp

                done = export_dcp(folder, dcp, report=report)
    _print(done, json=json)


@app.command("import")
def import_checkpoint(
    path: Annotated[
        Path,
        Argument(
            metavar="PATH",
            help="Folder of a Hugging Face model, one .safetensors file, or a folder of torch.distributed.checkpoint.",
        ),
    ],
    *,
    out: Annotated[Path, Option(metavar="DIR", help="New folder of checkpoints, with step-0 in it.")],
    trust: Annotated[
        bool, Option("--trust", help="Read the pickles of torch.distributed.checkpoint, which can run any code.")
    ] = False,
    progress: Progress = None,
    json: Json = False,
) -> None:
    """Write the weights of PATH as a checkpoint."""
    with session(json_output=json):
        from paceline.progress import measuring

        with measuring(progress, "import") as report:
            if (path / ".metadata").exists():
                from paceline.checkpoint.interop_dcp import import_dcp

                done = import_dcp(path, out, trust, report=report)
            else:
                from paceline.checkpoint.interop_safetensors import import_safetensors

                done = import_safetensors(path, out, report=report)
    _print(done, json=json)


def _print(done: "Transfer", *, json: bool) -> None:
    """Print what was written, and on stderr what was left out."""
    if json:
        print_json(done._asdict() | {"source": str(done.source), "target": str(done.target)})
        return
    echo(f"{done.source} -> {done.target}: {done.tensors:,} tensors, {amount(done.size_bytes)}")
    for note in done.notes:
        typer.secho(note, fg="yellow", err=True)
