"""predict: what a model gives for an input, computed by the workers of one replica."""

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.core.errors import InputError, unknown
from paceline.core.types import Seconds
from paceline.engine.inference.predictors import (
    InProcessPredictor,
    LocalPredictor,
    Predictor,
    TorchrunPredictor,
    refuse_inputs,
)
from paceline.engine.inference.worker import InferenceRequest
from paceline.engine.run_context import refuse_torchrun
from paceline.engine.spmd.process_group import LaunchEnv
from paceline.program import Program, Tree
from paceline.run import Run, load
from paceline.safe_files import State, reading
from paceline.strategy import Strategy

ENGINES = ("distributed", "local")


def predict(
    program: Program,
    inputs: Tree,
    strategy: Strategy | str = "replicas=1",
    *,
    engine: str = "local",
    state: Run | State | str | Path | None = None,
    timeout_s: Seconds = 60.0,
) -> Tree:
    """The output of a program's model, in evaluation mode: dropout is off, running statistics are used.

    Shards also make a single sample quicker; stages work on several micro-batches at a time. What comes out is what
    ``model.eval()(inputs)`` gives in one process, up to the order in which floating-point numbers are added. The model
    is captured, cut and divided anew in each call, and checked against itself, by every worker: give many samples at
    once, or keep the workers with :func:`predictor`.

    Args:
        program: whose model it is; its data, loss and optimizer are not used.
        inputs: a batch, as the model is called with it: a tensor, a tuple (``model(*inputs)``) or a dict
            (``model(**inputs)``).
        strategy: of one replica, a value or its text: ``"shards=2"``, ``"stages=2"``, ``"stages=2 shards=2"``. What it
            says of training (schedule, aggregation) does not matter here.
        engine: ``local`` (processes on this host), or ``distributed`` (those that torchrun started; each is given the
            same inputs and returns the whole output).
        state: parameters and buffers: of a run, of a run saved in a folder, or by full name; None: A_0.
        timeout_s: bound on every wait of one worker for another.

    Returns:
        The whole output, on the CPU, without a graph.

    Raises:
        InputError: what can't be done as written.
        WorkerError: the model failed in a worker, or a worker ended.

    >>> import functools
    >>> program = Program(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.5)),
    ...     loss=torch.nn.functional.mse_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    ...     train=(torch.zeros(64, 8), torch.zeros(64, 4)))
    >>> predict(program, torch.ones(3, 8)).shape
    torch.Size([3, 4])
    """
    made = predictor(program, strategy, engine=engine, state=state, timeout_s=timeout_s)
    refuse_inputs(inputs)  # before anything is started
    with made as ask:
        return ask(inputs)


def predictor(
    program: Program,
    strategy: Strategy | str = "replicas=1",
    *,
    engine: str = "local",
    state: Run | State | str | Path | None = None,
    timeout_s: Seconds = 60.0,
) -> Predictor:
    """What answers as :func:`predict` does, as often as it is called inside a ``with`` block.

    Its workers stay until the end of the block. The model is captured, cut and divided for the first inputs, and anew
    for inputs of another form; another number of samples is none.

    Args:
        program: as for :func:`predict`.
        strategy: of one replica.
        engine: ``local`` or ``distributed``.
        state: parameters and buffers; None: A_0.
        timeout_s: bound on every wait of one worker for another.

    Raises:
        InputError: what can't be done as written.

    >>> import functools
    >>> program = Program(
    ...     model=lambda: torch.nn.Linear(8, 4), loss=torch.nn.functional.mse_loss,
    ...     optimizer=functools.partial(torch.optim.SGD, lr=0.1), train=(torch.zeros(64, 8), torch.zeros(64, 4)))
    >>> with predictor(program) as ask:
    ...     ask(torch.ones(3, 8)).shape, ask(torch.ones(1, 8)).shape
    (torch.Size([3, 4]), torch.Size([1, 4]))
    """
    strategy = Strategy.coerce(strategy)
    _refuse(strategy)
    question = InferenceRequest(program, strategy, _state(state), timeout_s)
    kind, _, backend = engine.partition(":")
    if kind == "local":
        refuse_torchrun("local")
        return InProcessPredictor(question) if strategy.workers == 1 else LocalPredictor(question)
    if kind == "distributed":
        _refuse_size(strategy)
        return InProcessPredictor(question) if strategy.workers == 1 else TorchrunPredictor(question, backend or None)
    raise unknown("engine for predict", engine, ENGINES)


def read_inputs(path: str | Path) -> Tree:
    """What ``torch.save`` has written: a tree of tensors, read without unpickling code.

    Raises:
        InputError: the file is missing, damaged, or holds something else.
    """
    if not Path(path).is_file():
        raise InputError(f"{path} is no file; write the path of what torch.save has written")
    with reading(Path(path)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
            raise ValueError(f"it holds no tensors that torch.save has written ({type(error).__name__})") from error


def _refuse(strategy: Strategy) -> None:
    if strategy.replicas > 1:
        raise InputError(
            f"replicas={strategy.replicas} are copies of one model, of which one answers; write replicas=1"
        )
    if strategy.device != "cpu":
        raise InputError(f"device={strategy.device}: predict is for CPUs as yet; write device=cpu")


def _refuse_size(strategy: Strategy) -> None:
    world = LaunchEnv.found()
    if world.size != strategy.workers:
        raise InputError(
            f"stages={strategy.stages} × shards={strategy.shards} = {strategy.workers} workers, but torchrun started "
            f"{world.size}; start {strategy.workers}"
        )


def _state(state: Run | State | str | Path | None) -> State | None:
    if isinstance(state, Run):
        return state.state
    if state is None or isinstance(state, Mapping):
        return state
    return load(state).state
