"""join: a script that somebody else has started, torchrun for instance, becomes a replica and keeps its own loop.

Without a launcher, by the address of a server, it is a replica from then on until it leaves.

The engine runs in a thread, whose loop hands its worker over and waits; the script's own thread makes the steps::

    script   --- join(model, optimizer) ------> worker ... optimizer.step() ... end of the with block ---> goes on
    engine          start, meet the others  -->  loop: waits ------------------------------------> finish, outcome
"""

import contextlib
import inspect
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.api.train import launch
from paceline.core.errors import InputError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.loop import signals_for_threads
from paceline.engine.server.peer import PeerError
from paceline.engine.serving.address import ServerAddress, found
from paceline.engine.serving.client import JoinedServer
from paceline.engine.serving.server import ServingEngine
from paceline.engine.worker import TrainingEnded, Worker
from paceline.program import Program
from paceline.replica.step_options import without_options
from paceline.strategy import Strategy
from paceline.train_options import TrainOptions, job_of


@contextlib.contextmanager
def join(
    program: Program | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    address: str | os.PathLike[str] | None = None,
    strategy: Strategy | str | None = None,
    engine: str = "distributed",
    seed: int = 0,
    clip_norm: float | None = None,
    **settings: Any,
) -> Iterator[Worker]:
    """Let this process be a replica of a run, for the time of a ``with`` block; its loop stays where it is.

    >>> import paceline
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with paceline.join(model=model, optimizer=optimizer) as worker:
    ...     for inputs in worker.data(torch.randn(12, 4).split(4)):
    ...         optimizer.zero_grad()
    ...         model(inputs).square().mean().backward()
    ...         optimizer.step()
    >>> worker.replicas
    1

    Under torchrun each rank is a replica. Alone, the process is the only one, and the loop is the plain torch loop.
    After the block ``model`` has the trained parameters on every rank. Ctrl-C and SIGTERM end the block after the step
    under way, on all ranks, and the script goes on; a second Ctrl-C is raised at once.

    Args:
        program: model, optimizer and, if the loop wants them, loss and data; or
        model: the script's own model, with the same values on all ranks, which stays the one that is trained, and
        optimizer: the script's own optimizer of it; within the block its ``step()`` and ``state_dict()`` are those of
            ``worker.optimizer``, whose groups are its own. The state that it has goes on.
        address: of a server, :func:`~paceline.serve`, that this process joins now and leaves at the end of the block:
            ``"HOST:PORT"``, with its token in the environment variable ``PACELINE_TOKEN``, or the folder of its run.
            Strategy and ``settings`` are the server's, but for ``timeout_s``, after which one that does not answer is
            given up. None: the processes are those that a launcher has started.
        strategy: of as many replicas as processes; None: synchronous ones.
        engine: ``distributed``, or ``distributed:gloo`` and the like.
        seed: of what ``worker.data`` shuffles where the loader has no generator of its own.
        clip_norm: bound of an update's norm, over all of its gradients; ``clip_grad_norm_`` in the loop is of one
            replica's. With ``program`` it is the program's.
        settings: keyword arguments of :func:`~paceline.train`; without a budget training ends with the block.

    Yields:
        The worker.

    Raises:
        InputError: something can't be done as written; a server refuses this process, the others go on.
        WorkerError: another rank failed; the server is gone, or has gone on without this process.
    """
    if address is not None:
        _refuse_with_address(strategy, engine, clip_norm, settings)
    if engine.partition(":")[0] != "distributed":
        raise InputError(
            f"join(engine={engine!r}): that engine starts its own processes; write paceline.launch(loop, program, "
            f"strategy, engine={engine!r}), or engine='distributed'"
        )
    given = program_of("join", program, model, optimizer, seed, clip_norm)
    handover = _Handover(model)
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    if address is None:
        strategy = strategy_of(strategy)
        if strategy.spread and strategy.aggregation.collective is None:
            raise InputError(
                f"join(strategy={str(strategy)!r}): only the first worker of each replica has a loop there; write "
                f"paceline.launch(loop, program, {str(strategy)!r}, engine='distributed')"
            )
        check_device(model, strategy.device)
        settings, alone = {"progress": False} | settings, strategy.workers == 1
        worker = handover.start(lambda: launch(handover.loop, given, strategy, engine=engine, **settings).state)
    else:
        check_device(model)
        train, alone = joining(found(address), given, handover.loop, settings.get("timeout_s"))
        worker = handover.start(train)
    if alone:  # it is the plain loop: it draws what it would have drawn
        torch.set_rng_state(generator)
    torch.set_num_threads(handover.threads)
    with signals_for_threads():
        try:
            if model is not None:  # it has A from here on
                opened = worker.model
                assert opened is model, "the script's is trained"
            with contextlib.suppress(TrainingEnded), _stepping(optimizer, worker):
                yield worker
        except TrainingEnded as error:
            handover.end(None)
            raise WorkerError("the run has ended before this process could begin") from error
        except KeyboardInterrupt:
            handover.end(None)
            raise
        except BaseException as error:
            handover.end(error)
            raise
        finally:
            torch.set_num_threads(threads)
        state = handover.end(None)
    if model is not None:
        write_state(model, state)


def program_of(
    caller: str,
    program: Program | None,
    model: nn.Module | None,
    optimizer: Optimizer | None,
    seed: int,
    clip_norm: float | None,
) -> Program:
    """Return the program, or that of a script's own model and optimizer.

    Raises:
        InputError: both are given, or neither; ``caller`` is the function's name.
    """
    if program is None:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise InputError(
                f"{caller} needs what is trained; write paceline.{caller}(model=model, optimizer=optimizer) with a "
                f"torch module and its optimizer, or paceline.{caller}(program)"
            )
        like = OptimizerLike.of(optimizer, model)
        return Program(model=Copies(deepcopy(model)), optimizer=like, seed=seed, clip_norm=clip_norm)
    if model is not None or optimizer is not None:
        raise InputError(f"{caller} has both program and model or optimizer; write one of them")
    if clip_norm is not None:
        raise InputError(f"{caller} has both program and clip_norm; write Program(clip_norm=…)")
    return program


def strategy_of(given: Strategy | str | None) -> Strategy:
    """Return the strategy of a run; None: synchronous replicas, as many as the launcher has started processes."""
    return Strategy.coerce(f"replicas={os.environ.get('WORLD_SIZE', '1')}" if given is None else given)


def _refuse_with_address(
    strategy: Strategy | str | None, engine: str, clip_norm: float | None, settings: Mapping[str, Any]
) -> None:
    """Raise InputError for what the server of a run says alone."""
    given: dict[str, Any] = {"strategy": strategy, "clip_norm": clip_norm, **settings}
    if engine != "distributed":
        given["engine"] = engine
    for name, value in given.items():
        if value is not None and name != "timeout_s":
            raise InputError(
                f"join(address=…, {name}={value!r}): that is for the server to say; write it in paceline.serve, and "
                "leave it out here"
            )


def joining(
    address: ServerAddress, program: Program, loop: Callable[[Worker], None], timeout_s: Seconds | None
) -> tuple[Callable[[], Mapping[str, Tensor]], bool]:
    """Join a server; return what runs the loop there, and whether this process is its first replica.

    Raises:
        InputError: the server refuses this process.
    """
    server = JoinedServer(address, timeout_s)
    try:
        terms = server.terms
        if program.clip_norm not in (None, terms["clip_norm"]):
            raise InputError(
                f"Program(clip_norm={program.clip_norm}), but the server has clip_norm={terms['clip_norm']}; write the "
                "same, or leave it out"
            )
        program = replace(program, clip_norm=terms["clip_norm"])
        options = TrainOptions(loop=loop, timeout_s=terms["timeout_s"])
        job = job_of(program, terms["strategy"], ServingEngine(), options)
        job = replace(job, running_buffers=tuple(terms["running_buffers"]))
        assignment = server.join(job)
    except BaseException:
        server.close()
        raise
    return lambda: server.train(job, assignment), assignment.replica == 0


def check_device(model: nn.Module | None, device: str | None = None) -> None:
    """Raise InputError where a script's model is on an accelerator, but the run computes on the CPU.

    Args:
        model: of the script, if it has given one.
        device: of the strategy; None: processes that join a server compute on the CPU.
    """
    kinds = sorted({p.device.type for p in model.parameters()} - {"cpu"}) if model is not None else []
    if kinds and device is None:
        raise InputError(
            f"the model is on {kinds[0]}, but a server holds A on the CPU, where those compute that join it; write "
            "model.cpu()"
        )
    if kinds and device == "cpu":
        raise InputError(
            f"the model is on {kinds[0]}, but the strategy says device=cpu; write device={kinds[0]} in strategy=, or "
            "leave the model on the CPU"
        )


@contextlib.contextmanager
def _stepping(optimizer: Optimizer | None, worker: Worker) -> Iterator[None]:
    """Context manager: a script's own optimizer makes the worker's steps."""
    if optimizer is None:
        yield
        return
    # Schedulers wrap step for themselves.
    before = {name: vars(optimizer).get(name) for name in ("step", "state_dict", "load_state_dict")}

    def step(closure: Callable[[], Any] | None = None) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # as schedulers ask
        worker.optimizer.step(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as they do, and would wrap it again otherwise
    own = worker.optimizer
    vars(optimizer).update(step=step, state_dict=own.state_dict, load_state_dict=own.load_state_dict)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                vars(optimizer).pop(name)
            else:
                vars(optimizer)[name] = value


class _Handover:
    """The worker of an engine that runs in another thread, handed to this one.

    Args:
        model: that is trained in place of the engine's own; None: the engine's.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._worker: queue.SimpleQueue[Worker | BaseException] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._result: Mapping[str, Tensor] | BaseException | None = None
        self.threads = torch.get_num_threads()
        """CPU threads of the run in this process."""

    def start(self, run: Callable[[], Mapping[str, Tensor]]) -> Worker:
        """Run an engine in a thread; return its worker once its loop has begun, or raise what it has raised."""

        def target() -> None:
            try:
                self._result = run()
                # Where the loop was called, nobody waits any more.
                self._worker.put(WorkerError("the run has ended before this process could begin"))
            except BaseException as error:
                self._result = error
                self._worker.put(error)

        self._thread = threading.Thread(target=target, name="paceline-join", daemon=True)
        self._thread.start()
        worker = self._worker.get()
        if isinstance(worker, BaseException):
            raise worker
        return worker

    def loop(self, worker: Worker) -> None:
        """Hand the worker over; return, or raise the script's error, once the script has done with it."""
        self.threads = torch.get_num_threads()
        if self._model is not None:
            worker.use(self._model)
        self._worker.put(worker)
        if (error := self._ended.get()) is not None:
            raise error

    def end(self, error: BaseException | None) -> Mapping[str, Tensor]:
        """Let the run come to its end; return A, or raise what has ended it, unless that was the script's error.

        A call of the script's that a server no longer answers is no error of its own.
        """
        self._ended.put(error)
        assert self._thread is not None, "it has started"
        self._thread.join()
        result = self._result
        if isinstance(result, BaseException):
            raise result if error is None or isinstance(error, PeerError) else error
        assert result is not None, "a run has a result"
        return result


def write_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy the trained state into memory of the model's own."""
    without_options(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        own = model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            own[name].copy_(tensor)


@dataclass(frozen=True)
class Copies:
    """Makes copies of a script's own model, as it was."""

    model: nn.Module

    def __call__(self) -> nn.Module:
        """Make one."""
        return deepcopy(self.model)


@dataclass(frozen=True)
class OptimizerLike:
    """Makes optimizers of the class, groups, options and state of a script's own.

    Args:
        like: the script's.
        indices: for each group, the numbers of its parameters among all that are trained.
    """

    like: Optimizer
    indices: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, optimizer: Optimizer, model: nn.Module) -> "OptimizerLike":
        """Return that of an optimizer of all parameters of a model that are trained.

        Raises:
            InputError: it has others, or not all.
        """
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        number = {id(parameter): i for i, (_, parameter) in enumerate(trained)}
        groups = [[number.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        found = [i for group in groups for i in group if i is not None]
        absent = [name for i, (name, _) in enumerate(trained) if i not in found]
        if absent or len(found) != sum(map(len, groups)):
            what = f"has no {absent[0]}" if absent else "has parameters that are not the model's, or are not trained"
            raise InputError(
                f"the optimizer {what}; write it of all parameters of the model that have requires_grad, and join with "
                "both"
            )
        if len(groups) > 1 and len({p.dtype for _, p in trained}) > 1:
            raise InputError("an optimizer with several groups needs parameters of one dtype; write model.float()")
        return cls(optimizer, tuple(tuple(i for i in group if i is not None) for group in groups))

    def __call__(self, parameters: Any) -> Optimizer:
        """Make one, of parameters in the model's order."""
        every = list(parameters)
        script = {id(p) for group in self.like.param_groups for p in group["params"]}
        if script == {id(p) for p in every}:
            return self.like  # of the script's model itself
        groups = [
            {**group, "params": [every[i] for i in own]}
            for group, own in zip(self.like.param_groups, self.indices, strict=True)
        ]
        kind = type(self.like)
        taken = inspect.signature(kind.__init__).parameters
        made = kind(groups, **{name: value for name, value in self.like.defaults.items() if name in taken})
        for group, own in zip(self.like.param_groups, self.indices, strict=True):
            for parameter, i in zip(group["params"], own, strict=True):
                if parameter in self.like.state:
                    made.state[every[i]] = deepcopy(self.like.state[parameter])
        return made
