"""``paceline share``: several programs in turn on the same workers."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from paceline.cli.console import end, print_json, session
from paceline.cli.options import Json, Shared, may_register, with_shared
from paceline.cli.train import default_strategy
from paceline.core.errors import InputError, check_int
from paceline.core.option_checks import check_folder_given
from paceline.parameter_scheduling.schedulers import coerce


@with_shared
def share(
    shared: Shared,
    programs: Annotated[
        list[str],
        Argument(
            metavar="PROGRAM...", help="Two or more, each as in train: digits, file.py:name or package.module:name."
        ),
    ],
    *,
    strategy: Annotated[
        str | None, Option(help="Of all of them, as in train.", show_default="a replica a core, at most 4")
    ] = None,
    scheduler: Annotated[
        str, Option(help="Which is next: priority:eta=0.01 (by decrease of loss per second), cyclic, or uniform.")
    ] = "priority",
    slice_steps: Annotated[int, Option(help="Steps of each replica in a slice.")] = 100,
    loss: Annotated[str, Option(help="train_loss or test_loss.")] = "train_loss",
    checkpoint: Annotated[Path | None, Option(help="Folder where jobs are saved after each slice.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with what is in that folder; else begin.")] = False,
    json: Json = False,
) -> None:
    """Train each PROGRAM for a slice at a time, the one whose loss decreases fastest most often.

    --seconds is the budget of all together, --steps that of each; one leaves when it meets --until.
    """
    with session(json_output=json):
        if len(programs) == 1:
            raise InputError(f"{programs[0]} alone has nobody to share with; write two programs or more, or train")
        twice = [name for name in programs if programs.count(name) > 1]
        if twice:
            raise InputError(f"{twice[0]} is given twice; write it once, or two programs of a file, file.py:name")
        strategy = default_strategy() if strategy is None else strategy
        shared.refuse([strategy], programs)
        if not may_register(programs):
            coerce(scheduler)
        check_int("slice_steps", slice_steps, least=1)
        check_folder_given(checkpoint, resume=resume)
        from paceline.api.share_workers import share_workers

        jobs = {name: shared.program(name) for name in programs}
        result = share_workers(
            jobs,
            strategy,
            scheduler=scheduler,
            slice_steps=slice_steps,
            loss=loss,
            checkpoint=checkpoint,
            resume=resume,
            seed=shared.seed or 0,
            **shared.keywords(),
        )
    if json:
        print_json(result.to_json())
    else:
        echo(result.table())
    end(interrupted=result.interrupted, signal=result.signal)
