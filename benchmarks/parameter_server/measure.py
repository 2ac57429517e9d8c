"""The local engine beside Ray actors, beside processes without a server, and beside PyTorch's recipe for Hogwild.

Needs ``pip install ray``. The sides alternate; figures are medians, a ratio is the median of the rounds'. A turn of
another side is a process of its own, which has ended with all that it started before ours begins.
"""

import argparse
import functools

import programs
from table import OURS, Figures, alternate, head, middle, ratio, row
from turn import take
from window import WARM_UP_S

from paceline.api.train import train
from paceline.engine.base import Engine
from paceline.engine.local.engine import LocalEngine
from paceline.program import Program

TRIVIAL = [
    (2, 22_000, "sgd"),
    (8, 22_000, "sgd"),
    (25, 22_000, "sgd"),
    (8, 22_000, "adam"),
    (25, 22_000, "adam"),
    (2, 1_000_000, "sgd"),
    (8, 1_000_000, "sgd"),
    (25, 1_000_000, "sgd"),
]
"""Workers, parameters, optimizer."""

DESIGNS = ("separate", "merged")
"""Of the Ray actors."""

Options = argparse.Namespace


GRAPH = "Paceline, compile=graph"
"""Where a step is one list of operators."""


def paceline(
    engine: Engine, program: Program, workers: int, aggregation: str, seconds: float, *, graph: bool = False
) -> Figures:
    """Gradients a second of a run, after a second to warm up; under these aggregations each is an update."""
    strategy = f"replicas={workers} threads=1 aggregation={aggregation}{' compile=graph' if graph else ''}"
    run = train(program, strategy, engine=engine, seconds=seconds + WARM_UP_S, evaluate_every=WARM_UP_S, progress=False)
    warm, last = run.history[1], run.history[-1]
    return {GRAPH if graph else OURS: (last.gradients - warm.gradients) / (last.time_s - warm.time_s)}


def trivial(options: Options) -> None:
    """Updates a second where a Δ costs nothing."""
    columns = ["workers", "parameters", "optimizer", "Paceline", "Ray, separate", "Ray, merged"]
    head(f"updates/s, {_how(options)}", *columns, "÷ separate", "÷ merged")
    with LocalEngine(entry="trivial:main") as engine:
        for workers, parameters, optimizer in TRIVIAL:
            program = programs.trivial(parameters, optimizer)
            rounds = alternate(
                options.pairs,
                functools.partial(paceline, engine, program, workers, "asynchronous", options.seconds),
                functools.partial(
                    take,
                    "ray_server:trivial",
                    workers=workers,
                    parameters=parameters,
                    optimizer=optimizer,
                    seconds=options.seconds,
                ),
            )
            rates = [middle(rounds, side) for side in (OURS, *DESIGNS)]
            row(workers, f"{parameters:,}", optimizer, *rates, *(ratio(rounds, design) for design in DESIGNS))


ON_RAY = [(8, 22_000, "sgd"), (2, 22_000, "sgd"), (8, 1_000_000, "sgd"), (4, 25_000_000, "sgd")]
"""As TRIVIAL."""


def on_ray(options: Options) -> None:
    """Updates a second of Paceline's Ray engine, and of its ranks under torchrun, where a Δ costs nothing."""
    sides = ("stream", "calls", *DESIGNS, "ranks")
    columns = ["workers", "parameters", "optimizer", "by streams", "by calls", "Ray, separate", "Ray, merged"]
    ratios_to = ["÷ calls", "÷ separate", "÷ merged", "÷ torchrun"]
    head(f"updates/s, {_how(options)}", *columns, "torchrun", *ratios_to)
    for workers, parameters, optimizer in ON_RAY:
        case = {"workers": workers, "parameters": parameters, "optimizer": optimizer, "seconds": options.seconds}
        rounds = alternate(
            options.pairs,
            functools.partial(take, "on_ray:rates", **case),
            functools.partial(take, "ray_server:trivial", **case),
            functools.partial(take, "on_ranks:rates", **case),
        )
        rates = [middle(rounds, side) for side in sides]
        ratios = [ratio(rounds, side, ours="stream") for side in sides[1:]]
        row(workers, f"{parameters:,}", optimizer, *rates, *ratios)


def cnn(options: Options) -> None:
    """Gradients a second of 25 workers."""
    workers = 25
    case = {"data": options.data, "workers": workers, "seconds": options.seconds}
    program = programs.images(options.data)
    with LocalEngine() as engine:
        rounds = alternate(
            options.pairs,
            functools.partial(paceline, engine, program, workers, "asynchronous", options.seconds),
            functools.partial(take, "processes:alone", **case),
            functools.partial(take, "processes:gradients", **case),
            functools.partial(take, "ray_server:cnn", **case),
        )
    head(
        f"gradients/s of {workers} workers on {_images(options)}, {_how(options)}", "side", "gradients/s", "Paceline ÷"
    )
    row("Paceline, asynchronous", middle(rounds, OURS), "")
    row("processes that train alone", middle(rounds, "alone"), ratio(rounds, "alone"))
    row("processes that compute gradients", middle(rounds, "gradients"), ratio(rounds, "gradients"))
    for design in DESIGNS:
        row(f"Ray actors, {design}", middle(rounds, design), ratio(rounds, design))


def computing(options: Options) -> None:
    """Updates a second of 8 workers that run a model forward and backward, beside Ray actors that compute nothing."""
    workers, parameters = 8, 22_000
    columns = "Paceline, forward and backward", GRAPH, "Ray, separate, nothing", "Ray, merged, nothing"
    head(f"updates/s, {_how(options)}", *columns, "ratio", "÷ merged", "graph ratio")
    case = {"workers": workers, "parameters": parameters, "optimizer": "sgd", "seconds": options.seconds}
    with LocalEngine() as engine:
        program = programs.trivial(parameters, "sgd")
        rounds = alternate(
            options.pairs,
            functools.partial(paceline, engine, program, workers, "asynchronous", options.seconds),
            functools.partial(paceline, engine, program, workers, "asynchronous", options.seconds, graph=True),
            functools.partial(take, "ray_server:trivial", **case),
        )
    ratios = [ratio(rounds, design) for design in DESIGNS]
    sides = OURS, GRAPH, *DESIGNS
    row(*(middle(rounds, side) for side in sides), *ratios, ratio(rounds, DESIGNS[0], ours=GRAPH))


def hogwild(options: Options) -> None:
    """Updates a second, in place and without locks."""
    title = f"updates/s on {_images(options)}, {_how(options)}"
    head(title, "workers", "Paceline, hogwild", "PyTorch's recipe", "ratio")
    program = programs.images(options.data)
    with LocalEngine() as engine:
        for workers in (2, 8):
            case = {"data": options.data, "workers": workers, "seconds": options.seconds}
            rounds = alternate(
                options.pairs,
                functools.partial(paceline, engine, program, workers, "hogwild", options.seconds),
                functools.partial(take, "processes:recipe", **case),
            )
            row(workers, middle(rounds, OURS), middle(rounds, "recipe"), ratio(rounds, "recipe"))


def _how(options: Options) -> str:
    return f"medians of {options.pairs} alternating rounds of {options.seconds:g} s for each side"


def _images(options: Options) -> str:
    return "noise of MNIST's shape (no --data)" if options.data is None else "MNIST"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = parser.add_subparsers(title="tables", required=True)
    for table, seconds in ((trivial, 3.0), (on_ray, 3.0), (cnn, 10.0), (computing, 3.0), (hogwild, 10.0)):
        options = tables.add_parser(table.__name__, help=table.__doc__)
        options.set_defaults(table=table)
        options.add_argument("--pairs", type=int, default=5, help="rounds in which each side is measured (%(default)s)")
        options.add_argument("--seconds", type=float, default=seconds, help="of each measurement (%(default)g)")
        if table in (cnn, hogwild):
            options.add_argument("--data", metavar="DIR", help="MNIST's files; without it noise of the same shape")
    chosen = parser.parse_args()
    chosen.table(chosen)


if __name__ == "__main__":
    main()
