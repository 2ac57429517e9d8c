"""predict and predictor: the output of a model for an input, computed by the workers of one replica."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from paceline.core.errors import InputError, unknown
from paceline.core.safe_files import reading
from paceline.core.types import Seconds
from paceline.device import refuse_absent, resolved
from paceline.engine import inference
from paceline.engine.run_context import refuse_torchrun
from paceline.engine.spmd.launch_env import LaunchEnv
from paceline.program import Program, Tree
from paceline.run import Run, State, load
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
    """Return the output of a program's model in evaluation mode: dropout is off, running statistics are used.

    Shards make a single sample faster, too; stages work on several micro-batches at a time. The output is that of
    ``model.eval()(inputs)`` in one process, up to the order in which floating-point numbers are added. Each call
    captures, cuts, divides and verifies the model anew on every worker: give many samples at once, or keep the workers
    with :func:`predictor`.

    Args:
        program: program of the model; its data, loss and optimizer are not used.
        inputs: a batch as the model is called with it: a tensor, a tuple (``model(*inputs)``) or a dict
            (``model(**inputs)``), samples along the first dim.
        strategy: one replica, a value or its text: ``"shards=2"``, ``"stages=2"``, ``"stages=2 shards=2"``. Fields
            about training (schedule, aggregation) have no effect.
        engine: ``local`` (processes on this host), or ``distributed`` (the processes that torchrun started; each is
            given the same inputs and returns the whole output).
        state: parameters and buffers: of a run, of a run saved in a folder, or by full name; None: A_0.
        timeout_s: bound in seconds on every wait of one worker for another.

    Returns:
        The whole output, on the CPU, without a graph.

    Raises:
        InputError: something can't be done as written.
        WorkerError: the model failed in a worker, or a worker ended.

    >>> import functools
    >>> program = Program(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.5)),
    ...     loss=torch.nn.functional.mse_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    ...     train=(torch.zeros(64, 8), torch.zeros(64, 4)))
    >>> predict(program, torch.ones(3, 8)).shape
    torch.Size([3, 4])
    """
    opened = predictor(program, strategy, engine=engine, state=state, timeout_s=timeout_s)
    inference.refuse_inputs(inputs)  # before any process is started
    with opened as call:
        return call(inputs)


def predictor(
    program: Program,
    strategy: Strategy | str = "replicas=1",
    *,
    engine: str = "local",
    state: Run | State | str | Path | None = None,
    timeout_s: Seconds = 60.0,
) -> inference.Predictor:
    """Return a callable that works as :func:`predict` does, any number of times inside one ``with`` block.

    Its workers stay until the end of the block. The model is captured, cut and divided for the first inputs, and again
    for inputs of another form; another number of samples is the same form.

    Args:
        program: program of the model, as for :func:`predict`.
        strategy: one replica, as for :func:`predict`.
        engine: ``local`` or ``distributed``.
        state: parameters and buffers; None: A_0.
        timeout_s: bound in seconds on every wait of one worker for another.

    Returns:
        A context manager: inputs -> output.

    Raises:
        InputError: something can't be done as written.

    >>> import functools
    >>> program = Program(
    ...     model=lambda: torch.nn.Linear(8, 4), loss=torch.nn.functional.mse_loss,
    ...     optimizer=functools.partial(torch.optim.SGD, lr=0.1), train=(torch.zeros(64, 8), torch.zeros(64, 4)))
    >>> with predictor(program) as ask:
    ...     ask(torch.ones(3, 8)).shape, ask(torch.ones(1, 8)).shape
    (torch.Size([3, 4]), torch.Size([1, 4]))
    """
    strategy = Strategy.coerce(strategy)
    if strategy.replicas > 1:
        raise InputError(
            f"replicas={strategy.replicas} are copies of one model, of which one answers; write replicas=1"
        )
    strategy = replace(strategy, device=resolved(strategy.device))
    refuse_absent(strategy.device)
    if isinstance(state, Run):
        state = state.state
    elif state is not None and not isinstance(state, Mapping):
        state = load(state).state
    request = inference.InferenceRequest(program, strategy, state, timeout_s)
    kind, _, backend = engine.partition(":")
    prepare = partial(inference.in_process, request)
    if kind == "local":
        refuse_torchrun("local")
        if strategy.workers > 1:
            prepare = partial(inference.on_this_host, request)
        return inference.Predictor(prepare)
    if kind == "distributed":
        # torchrun has started the processes already, so their number must be that of the workers.
        world = LaunchEnv.current()
        if world.size != strategy.workers:
            raise InputError(
                f"stages={strategy.stages} × shards={strategy.shards} = {strategy.workers} workers, but torchrun "
                f"started {world.size}; start {strategy.workers}"
            )
        if strategy.workers > 1:
            prepare = partial(inference.under_torchrun, request, backend or None)
        return inference.Predictor(prepare)
    raise unknown("engine for predict", engine, ENGINES)


def read_inputs(path: str | Path) -> Tree:
    """Return the tree of tensors in a file of ``torch.save``, read without unpickling code.

    Args:
        path: path of the file.

    Raises:
        InputError: the file is missing, damaged, or holds anything but tensors.
    """
    if not Path(path).is_file():
        raise InputError(f"{path} is no file; write the path of what torch.save has written")
    with reading(Path(path)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # a file that is none of torch.save's raises nearly anything
            raise ValueError(f"it holds no tensors that torch.save has written ({type(error).__name__})") from error
