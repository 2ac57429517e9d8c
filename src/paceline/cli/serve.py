"""``paceline serve``: a server of A that processes join by its address, each with a loop of its own."""

import functools
from dataclasses import fields
from typing import Annotated, Any

from typer import Argument, Option

from paceline.cli.console import end, print_json, session
from paceline.cli.options import (
    CheckpointEvery,
    CheckpointFolder,
    Json,
    Keep,
    ProgramName,
    Resume,
    Shared,
    refuse_saving,
    with_shared,
)
from paceline.cli.train import print_summary
from paceline.core.option_checks import check_amounts, check_reactions
from paceline.engine.serving.address import parse

# Options of other commands that are about replicas of Paceline's own.
_LEFT_OUT = ("engine", "delay", "times", "noise_scale", "on_death", "seconds", "suspect_after_s", "trace")


@functools.partial(with_shared, leave_out=_LEFT_OUT)
def serve(
    shared: Shared,
    program: ProgramName,
    strategy: Annotated[
        str, Argument(metavar="[STRATEGY]", help="With bounds for the processes that may be there at a time.")
    ] = "replicas=1..8 aggregation=asynchronous",
    *,
    address: Annotated[str, Option(help="HOST:PORT to listen at; port 0: any that is free.")] = "127.0.0.1:0",
    suspect_after_s: Annotated[
        float, Option(help="Silence in seconds after which the others go on without a process that computes.")
    ] = 30.0,
    timeout_s: Annotated[float, Option(help="Seconds within which a process must answer.")] = 60.0,
    seconds: Annotated[float | None, Option(rich_help_panel="Budget", help="Training time.")] = None,
    checkpoint: CheckpointFolder = None,
    checkpoint_every: CheckpointEvery = None,
    keep: Keep = 3,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Hold PROGRAM's parameters for processes that join by address: paceline serve train.py:program --out runs/a.

    They join with paceline.join(..., address="runs/a"). Without a budget it ends once all that have joined have left.
    """
    with session(json_output=json):
        shared.refuse([strategy], [program])
        parse(address)
        check_reactions(shared.on_nonfinite, None, suspect_after_s=suspect_after_s, timeout_s=timeout_s)
        check_amounts({"seconds": seconds})
        refuse_saving(checkpoint, checkpoint_every, keep, resume=resume)
        from paceline.api.serve import serve as run_server

        given = [field.name for field in fields(Shared) if field.name not in (*_LEFT_OUT, "data", "batch_size", "seed")]
        saving: dict[str, Any] = {"checkpoint": checkpoint, "checkpoint_every": checkpoint_every, "keep": keep}
        patience = {"suspect_after_s": suspect_after_s, "timeout_s": timeout_s, "seconds": seconds}
        options = {name: getattr(shared, name) for name in given} | saving | patience | {"resume": resume}
        run = run_server(shared.program(program), strategy=strategy, address=address, **options)
    if json:
        print_json(run.to_json())
    else:
        print_summary(run)
    end(interrupted=run.summary["interrupted"], signal=run.summary.get("signal"))
