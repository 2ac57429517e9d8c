"""resume: a run goes on from a checkpoint, by default as it was, or under another strategy and on another engine."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.api.train import train_with
from paceline.checkpoint.options import OPTIONS
from paceline.checkpoint.reader import find, nothing_in
from paceline.core.errors import InputError
from paceline.engine.base import Engine
from paceline.program import Program
from paceline.run import Run
from paceline.strategy import Strategy, is_auto
from paceline.support import ENGINE_FEATURES, Case, Row, first_row
from paceline.train_options import TrainOptions

_BUDGET = ("steps", "epochs", "seconds", "until")
# Options that not every strategy and engine takes.
_LIMITED = ("times", "on_nonfinite", "on_death", "noise_scale")


def resume(
    folder: str | os.PathLike[str],
    program: Program,
    strategy: Strategy | str | None = None,
    *,
    engine: str | Engine | None = None,
    **settings: Any,
) -> Run:
    """Go on from the newest sound checkpoint of a folder.

    Args:
        folder: the one that ``checkpoint=`` named, in which the run is saved further; or one checkpoint in it,
            ``ckpt/step-1200``, to go back to, after which the run is saved where ``settings`` say.
        program: the program of the run.
        strategy: how training is split and paced from now on; None: as before.
        engine: name of an engine, or an open engine; None: that of the run.
        settings: keyword arguments of :func:`~paceline.train`. Without a budget it is that of the run; budgets are
            totals: what was spent before counts. Other options that are not given (``delay``, ``on_nonfinite``) are
            those of the run; ``notes["resumed"]`` names any that it goes on without: a ``loop`` or ``callbacks``, which
            no checkpoint has, and what the new strategy or engine does not take.

    Returns:
        The run, with its history from the beginning.

    Raises:
        InputError: no sound checkpoint is there, it is of another program, or something can't be done as written.

    After a run of ``train(program, "replicas=4", steps=1000, checkpoint="ckpt")`` that was killed::

        paceline.resume("ckpt", program)
        paceline.resume("ckpt", program, "replicas=2 stages=2", engine="ray", steps=2000)
    """
    path = Path(folder)
    found, damaged = find(path)
    if found is None:
        raise nothing_in(path)
    head = found.manifest.head
    goes_on_alike = strategy is None and engine is None
    if strategy is None:
        strategy = _text(found.folder, head, "strategy")
        try:
            Strategy.parse(strategy)
        except InputError as error:
            raise InputError(f"the strategy of {found.folder} can't be read: {error}") from error
    engine = _text(found.folder, head, "engine") if engine is None else engine
    if engine == "serving":
        raise InputError(
            f"{found.folder} is of a server that processes joined; write paceline.serve(…, checkpoint={str(folder)!r}, "
            "resume=True), or engine='local' to go on with replicas of this host"
        )
    defaults: dict[str, Any] = {}
    if all(settings.get(unit) is None for unit in _BUDGET):
        defaults |= _values(head.get("budget"), (*_BUDGET, "evaluate_every"))
    if path.absolute() != found.folder:
        defaults |= {"checkpoint": path} | _values(head.get("interval"), ("checkpoint_every", "keep"))
    of_run = _values(head.get("options"), [name for name in OPTIONS if name not in settings])
    taken = of_run if goes_on_alike else _taken(of_run, strategy, engine, settings)
    named = head.get("other_options")
    others = [name for name in OPTIONS if isinstance(named, list) and name in named and name not in settings]
    dropped = (*(name for name in of_run if name not in taken), *others)
    settings = defaults | taken | settings
    output = {name: settings.pop(name) for name in ("progress", "out", "tensorboard") if name in settings}
    options = replace(TrainOptions.of("resume", settings), resume=path, found=(found, damaged), dropped=dropped)
    return train_with(program, strategy, engine, options, **output)


def _taken(
    of_run: Mapping[str, Any], strategy: Strategy | str, engine: str | Engine, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a run that go with another strategy or engine, and with what the user has given."""
    name = engine if isinstance(engine, str) else engine.name
    features = ENGINE_FEATURES.get(name) if isinstance(engine, str) else engine.features
    if is_auto(strategy) or features is None:
        return dict(of_run)
    case = functools.partial(Case.of, Strategy.coerce(strategy), name, features)

    def refusal(options: Mapping[str, Any]) -> Row | None:
        return first_row(case(**{each: value if each != "times" else True for each, value in options.items()}))

    together = {each: settings[each] for each in _LIMITED if settings.get(each) is not None}
    before, taken = refusal(together), dict(of_run)
    for each in [each for each in _LIMITED if each in of_run]:
        if refusal(together | {each: of_run[each]}) is before:
            together[each] = of_run[each]
        else:
            del taken[each]
    return taken


def _text(folder: Path, head: Mapping[str, Any], name: str) -> str:
    """Return a text of a manifest, which anybody may have written."""
    if not isinstance(head.get(name), str):
        raise InputError(f"{folder} does not say its {name}; write resume(…, {name}=…)")
    return str(head[name])


def _values(given: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of these names that a manifest has, as far as they can be any."""
    values = given if isinstance(given, Mapping) else {}
    return {name: values[name] for name in names if isinstance(values.get(name), (int, float, str))}
