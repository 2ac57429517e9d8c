"""Options that several commands have in common, declared once."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

from typer import Argument, Option

from paceline.checkpoint.options import CheckpointOptions
from paceline.clock.times import Delay, Times
from paceline.core.conditions import Condition
from paceline.core.option_checks import check_amounts, check_folder_given, check_reactions, check_samples, check_seed
from paceline.datasets.resolve import refuse_unknown
from paceline.engine import split_name
from paceline.strategy import Strategy, is_auto, without_classes

if TYPE_CHECKING:
    from paceline.program import Program

P = ParamSpec("P")

# Budget if none is given.
DEFAULT_SECONDS = 10.0

ProgramName = Annotated[
    str,
    Argument(
        metavar="PROGRAM",
        help="digits, synthetic, mnist, fashion-mnist, cifar10 or shakespeare; or file.py:name or package.module:name.",
    ),
]
Json = Annotated[bool, Option("--json", help="Print one JSON object on stdout and nothing else there.")]

_budget, _pace, _data, _output = (
    functools.partial(Option, rich_help_panel=panel) for panel in ("Budget", "Pace", "Data", "Output")
)
checkpoint_option = functools.partial(Option, rich_help_panel="Checkpoints")

CheckpointFolder = Annotated[
    Path | None, checkpoint_option(help="Folder to save the run in while it lasts, and once at its end.")
]
CheckpointEvery = Annotated[
    str | None, checkpoint_option(help='"5min", "90 s" or "500 steps" of each replica.', show_default="5min")
]
Keep = Annotated[int, checkpoint_option(help="How many checkpoints are kept.")]
Resume = Annotated[
    bool, checkpoint_option("--resume", help="Go on from the newest sound checkpoint; where there is none, begin.")
]


@dataclass(frozen=True)
class Shared:
    """Engine, budget, pace, data and output of a run."""

    engine: Annotated[
        str,
        Option(
            help="local (processes on this host), virtual (simulated time), distributed (under torchrun), ray, "
            "ray:auto or ray:HOST:PORT."
        ),
    ] = "local"
    steps: Annotated[int | None, _budget(help="Steps of each replica.")] = None
    epochs: Annotated[float | None, _budget(help="Passes over the training set, all replicas together.")] = None
    seconds: Annotated[
        float | None, _budget(help="Training time.", show_default=f"{DEFAULT_SECONDS:g} if no other is given")
    ] = None
    until: Annotated[str | None, _budget(help="A condition on the history: test_accuracy>=0.97")] = None
    evaluate_every: Annotated[
        float | None, _budget(help="Seconds or steps between evaluations; 20 over the budget by default.")
    ] = None
    delay: Annotated[str | None, _pace(help='Slow workers down: "fraction=0.5 normal:mean=0,std=0.25"')] = None
    times: Annotated[
        str | None,
        _pace(
            help='Virtual time in seconds: "compute=0.01 transfer=0 apply=0 gradient=0", or measured; '
            "network=cluster.toml instead of transfer: hosts and links of a file."
        ),
    ] = None
    noise_scale: Annotated[
        bool, _output("--noise-scale", help="Estimate the largest useful batch: noise scale, efficiency, goodput.")
    ] = False
    on_nonfinite: Annotated[str, _pace(help="stop, or skip and count a loss or gradient that is not finite.")] = "stop"
    on_death: Annotated[
        str | None,
        _pace(
            help="continue without a replica that dies, replace it, or stop.", show_default="continue if the engine can"
        ),
    ] = None
    suspect_after_s: Annotated[
        float, _pace(help="Silence in seconds after which a replica is named, and may be replaced.")
    ] = 5.0
    data: Annotated[Path | None, _data(help="Folder of the data set's standard files.")] = None
    batch_size: Annotated[int | None, _data(help="Samples per replica and step instead of the program's.")] = None
    seed: Annotated[
        int | None, _data(help="Seed of the start, the data order and delays, instead of the program's.")
    ] = None
    out: Annotated[Path | None, _output(help="New folder for the recorded run.")] = None
    trace: Annotated[bool, _output("--trace", help="Record spans for swimlanes.")] = False
    tensorboard: Annotated[bool, _output("--tensorboard", help="Also write TensorBoard events to the folder.")] = False
    progress: Annotated[
        bool | None,
        _output(
            "--progress/--no-progress",
            help="Show progress on stderr; by default if it is a terminal.",
            show_default=False,
        ),
    ] = None

    def refuse(self, strategies: Iterable[str], programs: Iterable[str]) -> None:
        """Raise InputError for words that no program and no engine could make sense of; it imports no torch.

        Args:
            strategies: texts of strategies, or ``auto``.
            programs: as named on the command line: a program's own file may register what a strategy names.
        """
        programs = list(programs)
        refuse_strategies(strategies, programs)
        for program in programs:
            refuse_unknown(program)
        if not may_register(programs):
            split_name(self.engine)
            for kind, text in ((Delay, self.delay), (Times, self.times)):
                if text is not None:
                    kind.parse(text)
        if self.until is not None:
            form = '--until "{}"'
            Condition.parse(self.until, form=form).refuse_unknown(form=form)
        check_amounts({name: getattr(self, name) for name in ("steps", "epochs", "seconds", "evaluate_every")})
        check_reactions(self.on_nonfinite, self.on_death, suspect_after_s=self.suspect_after_s)
        check_samples("batch_size", self.batch_size)
        if self.seed is not None:
            check_seed(self.seed)

    def program(self, name: str) -> "Program":
        """Load the program called ``name``, with the data, seed and batch size of the options."""
        from paceline.datasets import load_program

        return load_program(name, data=self.data, seed=self.seed, batch_size=self.batch_size)

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments that ``paceline.train`` and ``paceline.compare`` both take."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _PROGRAM_OPTIONS}
        if all(values[name] is None for name in ("steps", "epochs", "seconds", "until")):
            values["seconds"] = DEFAULT_SECONDS
        return values


def refuse_strategies(strategies: Iterable[str], programs: Iterable[str]) -> None:
    """Raise InputError for a strategy that is none, before torch is imported: that takes seconds.

    Args:
        strategies: texts of strategies, or ``auto``.
        programs: as named on the command line: a program's own file may register what a strategy names.
    """
    registered = may_register(programs)
    for text in strategies:
        if not is_auto(text):
            Strategy.parse(without_classes(text) if registered else text)


def may_register(programs: Iterable[str]) -> bool:
    """Return whether code of a user's, once it is imported, may register classes of its own."""
    return any(":" in program for program in programs)


def refuse_saving(folder: Path | None, every: str | None, keep: int, *, resume: bool) -> None:
    """Raise InputError for options about checkpoints that can't be read, or have no folder."""
    check_folder_given(folder, checkpoint_every=every, resume=resume)
    if folder is not None:
        CheckpointOptions.of(folder, every, keep)


_PROGRAM_OPTIONS = ("data", "batch_size", "seed")


def with_shared(
    command: Callable[Concatenate[Shared, P], None], leave_out: Collection[str] = ()
) -> Callable[..., None]:
    """Return a command that takes a :class:`Shared` first as a function of single options, as Typer needs it.

    Args:
        command: the command.
        leave_out: options that it does not have, which keep their defaults.
    """
    own = list(inspect.signature(command).parameters.values())[1:]
    common = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(Shared)
        if f.name not in leave_out
    ]

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        shared = Shared(**{parameter.name: values.pop(parameter.name) for parameter in common})
        command(shared, **values)  # type: ignore[call-arg]  # Typer passes all parameters by name

    # Typer reads the options from the signature.
    flat.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
    return flat
