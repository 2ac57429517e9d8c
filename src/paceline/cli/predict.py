"""``paceline predict``: the output of a program's model for a file of inputs."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from paceline.cli.console import print_json, session, write_target
from paceline.cli.options import Json, ProgramName, refuse_strategies
from paceline.datasets.resolve import refuse_unknown


def predict(
    program: ProgramName,
    *,
    source: Annotated[Path, Option("--input", help="Input of the model, saved by torch.save: tensors alone.")],
    out: Annotated[Path, Option(help="File for the output, to be read by torch.load.")],
    strategy: Annotated[str, Option(help='One replica: "shards=2", "stages=2", "stages=2 shards=2"')] = "replicas=1",
    run: Annotated[Path | None, Option(help="Folder of a saved run, whose parameters are used; else A_0.")] = None,
    data: Annotated[Path | None, Option(help="Folder of the data set's standard files.")] = None,
    json: Json = False,
) -> None:
    """Write the output of PROGRAM's model, in evaluation mode, computed by the workers of one replica."""
    with session(json_output=json):
        refuse_strategies([strategy], [program])
        refuse_unknown(program)
        target = write_target("--out", out)
        import torch

        from paceline.api.predictor import predict, read_inputs
        from paceline.datasets import load_program
        from paceline.program import leaves, map_tree

        output = predict(load_program(program, data=data), read_inputs(source), strategy, state=run)
        # A tensor that is a view would be saved with its whole storage.
        output = map_tree(lambda leaf: leaf.clone(), output)
        torch.save(output, target)
    shapes = [list(leaf.shape) for leaf in leaves(output)]
    if json:
        print_json({"strategy": strategy, "out": str(target), "shapes": shapes})
    else:
        echo(f"{target}: {', '.join(map(str, shapes))}")
