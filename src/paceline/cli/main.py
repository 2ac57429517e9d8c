"""``paceline``: the application with all its commands."""

from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import checkpoints, compare, plan, predict, report, scale, serve, share, trace, train, watch
from paceline.cli.console import whole_output

app = typer.Typer(
    name="paceline",
    help="Train PyTorch models in parallel, any way they can be split, at any pace.",
    no_args_is_help=True,
    # Typer's own tracebacks print local variables: whole tensors.
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (
    train.train,
    compare.compare,
    share.share,
    plan.plan,
    predict.predict,
    scale.scale,
    serve.serve,
    trace.trace,
    report.report,
    watch.watch,
):
    app.command()(command)
app.add_typer(checkpoints.app, name="checkpoints")


def print_version(version: bool) -> None:
    """Print the version and exit, if the option is given."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def paceline(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models in parallel, any way they can be split, at any pace."""
    del version


def main() -> None:
    """Run the ``paceline`` command."""
    with whole_output():
        app()
