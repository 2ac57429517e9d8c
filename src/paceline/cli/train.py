"""``paceline train``: one program under one strategy, and the summary of the run as a table."""

import os
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Exit, Option, echo

from paceline.cli.console import FAILED, end, print_json, session
from paceline.cli.options import (
    CheckpointEvery,
    CheckpointFolder,
    Json,
    Keep,
    ProgramName,
    Resume,
    Shared,
    checkpoint_option,
    refuse_saving,
    with_shared,
)
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
    ("cancelled steps", "cancelled", "{:,}"),
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


def print_summary(run: "Run") -> None:
    """Print the run as one short table on stdout, and the replicas that left before the end."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for label, key, form in ROWS:
        if run.summary.get(key) is not None:
            table.add_row(label, form.format(run.summary[key]))
    console = Console()
    # As Text: rich would read square brackets in a strategy as markup.
    console.print(Text(str(run.strategy), style="bold"), soft_wrap=True)
    console.print(table)
    if sentence := verdict(run.summary):
        console.print(Text(sentence), soft_wrap=True)
    for departure in run.left:
        line = f"replica {departure.replica} left at {departure.time_s:.1f} s: {departure.reason}"
        console.print(Text(line, style="yellow"), soft_wrap=True)


def default_strategy() -> str:
    """Return one replica per core, at most 4: enough to see the effect without filling a large machine."""
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
        bool, Option("--show-mesh", help="Print ranks, hosts and which of them communicate, and train nothing.")
    ] = False,
    hosts: Annotated[int | None, Option(help="With --show-mesh: over how many hosts the workers are spread.")] = None,
    checkpoint: CheckpointFolder = None,
    checkpoint_every: CheckpointEvery = None,
    keep: Keep = 3,
    resume: Resume = False,
    accept_changes: Annotated[
        bool, checkpoint_option("--accept-changes", help="Go on though the checkpoint is of another program.")
    ] = False,
    preemptible: Annotated[
        bool, checkpoint_option("--preemptible", help="After SIGTERM exit with 0, if all is saved, instead of 143.")
    ] = False,
    json: Json = False,
) -> None:
    """Train PROGRAM under one strategy and print what it reached."""
    strategy = default_strategy() if strategy is None else strategy
    with session(json_output=json):
        shown = {"--show-stages": show_stages, "--show-shards": show_shards, "--show-mesh": show_mesh}
        options = [option for option, given in shown.items() if given]
        if len(options) > 1:
            raise InputError(f"{' and '.join(options)} each print something else; write one of them")
        if hosts is not None and not show_mesh:
            raise InputError(f"--hosts {hosts} is for a drawing; write --show-mesh too, or leave it out")
        shared.refuse([strategy], [program])
        refuse_saving(checkpoint, checkpoint_every, keep, resume=resume)
        if options:
            text, values = _show(options[0], shared, program, strategy, hosts)
        else:
            if preemptible and checkpoint is None:
                raise InputError("--preemptible is for runs that are saved; write --checkpoint DIR too")
            from paceline.api.train import train
            from paceline.engine.run_context import is_main

            saving: dict[str, Any] = {"checkpoint": checkpoint, "checkpoint_every": checkpoint_every, "keep": keep}
            saving |= {"resume": resume, "accept_changes": accept_changes}
            run = train(shared.program(program), strategy, **shared.keywords(), **saving)
    if options:
        if json:
            print_json({"strategy": strategy, **values})
        else:
            echo(text)
        return
    # Under torchrun one rank prints.
    if is_main(shared.engine):
        if json:
            print_json(run.to_json())
        else:
            print_summary(run)
    signal = run.summary.get("signal")
    saved = run.summary["notes"].get("checkpoint_updates", 0) == run.summary["updates"]
    end(
        interrupted=run.summary["interrupted"],
        signal=signal,
        preempted=preemptible and saved and signal == "SIGTERM",
    )
    if "not_saved" in run.summary:
        raise Exit(FAILED)


def _show(option: str, shared: Shared, program: str, strategy: str, hosts: int | None) -> tuple[str, dict[str, Any]]:
    """Return what a ``--show-...`` option prints, as text and as JSON."""
    if option == "--show-stages":
        from paceline.api.show import show_stages

        table = show_stages(shared.program(program), strategy)
        return table, {"table": table}
    if option == "--show-shards":
        from paceline.api.show import sharding_of

        sharding = sharding_of(shared.program(program), strategy)
        return str(sharding), sharding.to_json()
    if hosts is None and shared.engine.partition(":")[0] in ("local", "ray"):
        from paceline.api.train import check

        check(shared.program(program), strategy, engine=shared.engine, steps=1)
    from paceline.api.mesh_drawing import draw_mesh

    drawing = draw_mesh(strategy, hosts, shared.engine)
    return str(drawing), drawing.to_json()
