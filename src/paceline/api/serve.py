"""serve: a server of A that processes join by its address, and leave when they like, each with a loop of its own."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.api.join import program_of, write_state
from paceline.api.train import train_with
from paceline.core.errors import InputError
from paceline.engine.serving.address import TOKEN, new_token, parse, token_of_environment
from paceline.engine.serving.server import ServingEngine
from paceline.engine.worker import Worker
from paceline.program import Program
from paceline.run import Run
from paceline.strategy import Strategy, is_auto
from paceline.train_options import TrainOptions

# Arguments of train that make no sense here, and why.
_NO = {
    "engine": "the replicas are processes that join",
    "loop": "the processes that join have loops of their own",
    "times": "nothing is simulated",
    "delay": "the processes that join take the time that they take",
    "on_death": "the run goes on without a process that has ended, and starts none",
    "trace": "the processes that join keep no spans",
    "noise_scale": "own loops compute their own gradients",
}

# Fields of a strategy that need processes which Paceline starts, with the values that they have here.
_ONE = {
    "stages": 1, "shards": 1, "servers": (None, 1), "standby": 0, "device": "cpu", "compile": False, "accumulate": 1,
    "pull_ahead": False, "shard_optimizer": (None, False), "shard_parameters": False, "partition": "global",
}  # fmt: skip


def serve(
    program: Program | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    strategy: Strategy | str = "replicas=1..8 aggregation=asynchronous",
    address: str = "127.0.0.1:0",
    seed: int = 0,
    clip_norm: float | None = None,
    **settings: Any,
) -> Run:
    """Hold A and its optimizer for processes that join by address, until the budget is spent, or Ctrl-C.

    Without a budget it ends once all processes that have joined have left. It prints the address, and where the token
    is that they need: in ``server.json`` in ``out``, which no other user can read, or in the environment variable
    ``PACELINE_TOKEN``, which it takes if that is set. In one shell, and in as many others as there are to be replicas::

        paceline.serve(model=model, optimizer=optimizer, out="runs/a")

        with paceline.join(model=model, optimizer=optimizer, address="runs/a") as worker:
            ...

    Args:
        program: model, optimizer and, if wanted, data: a test set is evaluated here; or
        model: a module with the values that training begins with, which has the trained ones afterwards, and
        optimizer: of it; the state that it has goes on.
        strategy: ``replicas=2..8``: training begins once two processes have joined, and eight may be there at a time;
            with any policy under which replicas may come and go.
        address: ``HOST:PORT`` to listen at; port 0: any that is free. Who can reach another address than loopback, and
            has the token, can join; what is sent is not encrypted.
        seed: of the start, where ``program`` is not given.
        clip_norm: bound of an update's norm. With ``program`` it is the program's.
        settings: keyword arguments of :func:`~paceline.train` about budget, evaluation, ``out``, checkpoints,
            callbacks and display. A process that is silent for ``suspect_after_s``, by default 30 seconds, while
            it computes a step that usually takes less, is left out from then on.

    Returns:
        The run; ``left`` names processes that have died.

    Raises:
        InputError: something can't be done as written; nothing was started.
        NonFiniteError: a Δ was not finite, under ``on_nonfinite="stop"``.
        CallbackError: a callback failed.
    """
    given, strategy = program_of("serve", program, model, optimizer, seed, clip_norm), _checked(strategy, settings)
    output = {name: settings.pop(name) for name in ("progress", "out", "tensorboard") if name in settings}
    place, usual = parse(address), dict[str, Any](suspect_after_s=30.0, loop=_elsewhere)
    options = TrainOptions.of("serve", usual | settings)
    options.check()
    token = token_of_environment()
    if token is None and output.get("out") is None:
        raise InputError(
            "serve has no place for the token with which processes join; write out='runs/a', or set the environment "
            f"variable {TOKEN}"
        )
    engine = ServingEngine(place, token or new_token(), from_environment=token is not None)
    run = train_with(given, strategy, engine, options, **output)
    if model is not None:
        write_state(model, run.state)
    return run


def _elsewhere(worker: Worker) -> None:
    """Stand for the loops of the processes that join, of which none runs here."""
    raise AssertionError(f"replica {worker.replica} has its loop elsewhere")


def _checked(strategy: Strategy | str, settings: dict[str, Any]) -> Strategy:
    """Return the strategy; raise InputError for what processes that join by themselves can't do."""
    for name, why in _NO.items():
        if settings.get(name):
            raise InputError(f"serve({name}={settings[name]!r}): {why}; leave {name} out")
    if is_auto(strategy):
        raise InputError("serve(strategy='auto'): nobody knows who will join; write 'replicas=1..8'")
    strategy = Strategy.coerce(strategy)
    if not strategy.elastic:
        raise InputError(
            f"replicas={strategy.replicas} is no pair of bounds, within which processes join and leave; write "
            f"replicas=1..{strategy.replicas}, or replicas={strategy.replicas}..{strategy.replicas} to begin with all"
        )
    for name, values in _ONE.items():
        value = getattr(strategy, name)
        if value not in (values if isinstance(values, tuple) else (values,)):
            raise InputError(
                f"{name}={value}: a process that joins has all of the model, and computes its own gradients on the "
                f"CPU; leave {name} out, or train with paceline.launch"
            )
    return strategy
