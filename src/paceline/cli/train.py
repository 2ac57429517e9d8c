"""``paceline train``: one program under one strategy.

``paceline train``: one program under one strategy.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from paceline.cli.console import end, print_json, session
from paceline.cli.options import Json, ProgramName, Shared, with_shared
from paceline.core.errors import InputError
from paceline.metrics.efficiency import verdict

if TYPE_CHECKING:
    from paceline.run import Run


ROWS = (
    ("test accuracy", "test_accuracy", "{:.2%}"),
    ("test loss", "test_loss", "{:.4f}"),
    ("training loss", "train_loss", "{:.4f}"),
    ("updates of A", "updates", "{:,}"),
    ("gradients", "gradients", "{:,}"),
    ("  discarded", "discarded", "{:,}"),
    ("mean staleness", "staleness_mean", "{:.2f}"),
    ("largest staleness", "staleness_max", "{:,}"),
    ("pipeline utilisation", "pipeline_utilisation", "{:.1%}"),
    ("bubble", "bubble", "{:.1%}"),
    ("samples/s", "samples_per_s", "{:,.0f}"),
    ("noise scale, samples", "noise_scale_mean", "{:,.0f}"),
    ("  standard error", "noise_scale_error", "{:.1%}"),
    ("efficiency", "efficiency", "{:.1%}"),
    ("goodput, samples/s", "goodput_samples_per_s", "{:,.0f}"),
    ("updates/s", "updates_per_s", "{:,.0f}"),
)


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and figure of all that was measured.

    >>> summary_rows({"test_accuracy": 0.9731, "updates": 12000, "test_loss": None})
    [('test accuracy', '97.31%'), ('updates of A', '12,000')]
    """
    return [(label, form.format(summary[key])) for label, key, form in ROWS if summary.get(key) is not None]


def print_summary(run: "Run") -> None:
    """The run in one short table on stdout, and the replicas that left it early."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for label, figure in summary_rows(run.summary):
        table.add_row(label, figure)
    console = Console()
    # As Text: square brackets in a strategy are no markup.
    console.print(Text(str(run.strategy), style="bold"), soft_wrap=True)
    console.print(table)
    if said := verdict(run.summary):
        console.print(Text(said), soft_wrap=True)
    for departure in run.left:
        line = f"replica {departure.replica} left at {departure.time_s:.1f} s: {departure.reason}"
        console.print(Text(line, style="yellow"), soft_wrap=True)


def default_strategy() -> str:
    """One replica a core, at most 4: enough to see the effect, and no machine is filled unasked."""
    return f"replicas={min(4, os.cpu_count() or 1)}"


@with_shared
def train(
    shared: Shared,
    program: ProgramName,
    *,
    strategy: Annotated[
        str | None,
        Option(
            help='"replicas=8 aggregation=smooth-switch:every=500", or auto: what is fastest here',
            show_default="a replica a core, at most 4",
        ),
    ] = None,
    show_stages: Annotated[
        bool, Option("--show-stages", help="Print where a pipeline's model is cut, and train nothing.")
    ] = False,
    show_shards: Annotated[
        bool, Option("--show-shards", help="Print how operators are divided and what that sends, and train nothing.")
    ] = False,
    show_mesh: Annotated[
        bool, Option("--show-mesh", help="Print ranks, hosts and who talks with whom, and train nothing.")
    ] = False,
    hosts: Annotated[int | None, Option(help="With --show-mesh: over how many hosts the ranks are spread.")] = None,
    json: Json = False,
) -> None:
    """Train PROGRAM under one strategy and print what it reached."""
    strategy = strategy or default_strategy()
    with session(json_output=json):
        _refuse_both({"--show-stages": show_stages, "--show-shards": show_shards, "--show-mesh": show_mesh}, hosts)
    if show_stages:
        _show_stages(shared, program, strategy, json_output=json)
        return
    if show_shards:
        _show_shards(shared, program, strategy, json_output=json)
        return
    if show_mesh:
        _show_mesh(shared, program, strategy, hosts, json_output=json)
        return
    with session(json_output=json):
        from paceline.api.train import train
        from paceline.engine.run_context import is_main

        run = train(shared.program(program), strategy, **shared.keywords())
    if json and is_main(shared.engine):
        print_json(run.to_json())
    elif is_main(shared.engine):
        print_summary(run)
    end(interrupted=run.summary["interrupted"])


def _refuse_both(shown: Mapping[str, bool], hosts: int | None) -> None:
    asked = [option for option, wanted in shown.items() if wanted]
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} each print something else; write one of them")
    if hosts is not None and not shown["--show-mesh"]:
        raise InputError(f"--hosts {hosts} is for a drawing; write --show-mesh too, or leave it out")


def _show_stages(shared: Shared, program: str, strategy: str, *, json_output: bool) -> None:
    with session(json_output=json_output):
        from paceline.api.show import show_stages

        table = show_stages(shared.program(program), strategy)
    if json_output:
        print_json({"strategy": strategy, "table": table})
    else:
        typer.echo(table)


def _show_shards(shared: Shared, program: str, strategy: str, *, json_output: bool) -> None:
    with session(json_output=json_output):
        from paceline.api.show import divided

        made = divided(shared.program(program), strategy)
    if json_output:
        print_json({"strategy": strategy, **made.to_json()})
    else:
        typer.echo(made)


def _show_mesh(shared: Shared, program: str, strategy: str, hosts: int | None, *, json_output: bool) -> None:
    with session(json_output=json_output):
        from paceline.api.show import drawn

        if shared.engine == "local" and hosts is None:
            from paceline.api.train import check

            check(shared.program(program), strategy, steps=1)
        made = drawn(strategy, hosts)
    if json_output:
        print_json({"strategy": strategy, **made.to_json()})
    else:
        typer.echo(made)
