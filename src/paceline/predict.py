"""predict: what a model gives for an input, computed by the workers of one replica."""

import os
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from paceline.comm.nursery import Nursery
from paceline.core.errors import InputError, unknown
from paceline.core.types import Seconds
from paceline.engine.distributed.run import own_settings
from paceline.engine.setup import refuse_torchrun
from paceline.engine.team.team import assembled
from paceline.engine.team.world import World, backend_for
from paceline.inference.answer import answer
from paceline.inference.crew import PRELOAD, asked
from paceline.inference.question import Question, together
from paceline.program import Program, Tree, call, leaves
from paceline.replica.forms import batch_size
from paceline.run import Run, load
from paceline.storage import State, reading
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
    once rather than few at a time.

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
    strategy = Strategy.coerce(strategy)
    _refuse(strategy, inputs)
    question = Question(program, strategy, _state(state), inputs, timeout_s)
    kind, _, backend = engine.partition(":")
    if kind == "local":
        refuse_torchrun("local")
        return _alone(question) if strategy.workers == 1 else _locally(question)
    if kind == "distributed":
        return _under_torchrun(question, backend or None)
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


def _refuse(strategy: Strategy, inputs: Tree) -> None:
    if strategy.replicas > 1:
        raise InputError(
            f"replicas={strategy.replicas} are copies of one model, of which one answers; write replicas=1"
        )
    if strategy.device != "cpu":
        raise InputError(f"device={strategy.device}: predict is for CPUs as yet; write device=cpu")
    if not any(leaf.dim() for leaf in leaves(inputs)):
        raise InputError(f"inputs={inputs!r} has no tensor of samples; give a batch as the model is called with it")
    if not batch_size(inputs):
        raise InputError("inputs has no sample; give at least one")


def _state(state: Run | State | str | Path | None) -> State | None:
    if isinstance(state, Run):
        return state.state
    if state is None or isinstance(state, Mapping):
        return state
    return load(state).state


def _alone(question: Question) -> Tree:
    with own_settings(), torch.no_grad(), question.program.autocast("cpu"):
        if question.strategy.threads is not None:
            torch.set_num_threads(question.strategy.threads)
        return call(question.model(), question.inputs)


def _threads(strategy: Strategy, here: int) -> int:
    return strategy.threads or max(1, len(os.sched_getaffinity(0)) // here)


def _locally(question: Question) -> Tree:
    strategy = question.strategy
    nursery = Nursery.start(PRELOAD)
    try:
        found = asked(question, nursery, _threads(strategy, strategy.workers))
    finally:
        nursery.close()
    return together(found, batch_size(question.inputs), _pieces(strategy))


def _under_torchrun(question: Question, backend: str | None) -> Tree:
    world, strategy = World.found(), question.strategy
    if world.size != strategy.workers:
        raise InputError(
            f"stages={strategy.stages} × shards={strategy.shards} = {strategy.workers} workers, but torchrun started "
            f"{world.size}; start {strategy.workers}"
        )
    if strategy.workers == 1:
        return _alone(question)
    with own_settings():
        torch.set_num_threads(_threads(strategy, world.local_size))
        carrier = backend_for("cpu", backend, world)
        with assembled(world, carrier, "cpu", question.timeout_s, watched=True) as team:
            mine = answer(question, team)
            found = [replace(mine, pieces=pieces) for pieces in team.gather(mine.pieces, "the output")]
    return together(found, batch_size(question.inputs), _pieces(strategy))


def _pieces(strategy: Strategy) -> int:
    return strategy.micro_batch_count if strategy.pipelined else 1
