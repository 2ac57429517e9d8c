"""``paceline train``: one program under one strategy."""

import os
from collections.abc import Mapping
from typing import Annotated

import typer
from typer import Option

from paceline.cli.options import Json, ProgramName, Shared, with_shared
from paceline.cli.session import end, print_json, session
from paceline.cli.tables import print_summary
from paceline.core.errors import InputError


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
        from paceline.engine.setup import tells
        from paceline.train import train

        run = train(shared.program(program), strategy, **shared.keywords())
    if json and tells(shared.engine):
        print_json(run.to_json())
    elif tells(shared.engine):
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
        from paceline.show_stages import show_stages

        table = show_stages(shared.program(program), strategy)
    if json_output:
        print_json({"strategy": strategy, "table": table})
    else:
        typer.echo(table)


def _show_shards(shared: Shared, program: str, strategy: str, *, json_output: bool) -> None:
    with session(json_output=json_output):
        from paceline.show_shards import divided

        made = divided(shared.program(program), strategy)
    if json_output:
        print_json({"strategy": strategy, **made.to_json()})
    else:
        typer.echo(made)


def _show_mesh(shared: Shared, program: str, strategy: str, hosts: int | None, *, json_output: bool) -> None:
    with session(json_output=json_output):
        from paceline.show_mesh import drawn

        if shared.engine == "local" and hosts is None:
            from paceline.train import check

            check(shared.program(program), strategy, steps=1)
        made = drawn(strategy, hosts)
    if json_output:
        print_json({"strategy": strategy, **made.to_json()})
    else:
        typer.echo(made)
