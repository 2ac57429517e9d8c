"""An own loop that computes its gradients itself: its optimizers, whose steps are the equation.

::

    loss.backward()     the loop's own code, on worker.model: the gradient at A_{t-1}
    optimizer.step()    push Δ, wait for as long as F says, pull A into the same parameters
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.aggregation import text_of
from paceline.core.errors import InputError
from paceline.core.types import ReplicaId
from paceline.engine.evaluation import Evaluator
from paceline.engine.run_context import RunContext
from paceline.replica.autograd import Autograd, OwnGradients
from paceline.replica.base import EMPTY, Batch
from paceline.replica.optimizer_factory import build_optimizer
from paceline.replica.step_options import BUFFER, OptionsCodec, optimizers_of


class WorkerOptimizer(Optimizer):
    """The optimizer of an own loop, as torch's are: what schedulers and the loop write to its groups goes with each Δ.

    Its state is with A. Nothing depends on its ``zero_grad``: ``model.zero_grad()`` does as well.

    Args:
        like: the program's optimizer, of the model's parameters; its groups are this one's.
        make_step: makes the step.
        updates: returns how many updates its part of A has had, as the loop sees A.
        states: returns the state of each parameter of A; None: it is at a server.
    """

    def __init__(
        self,
        like: Optimizer,
        make_step: Callable[[], None],
        updates: Callable[[], int],
        states: Callable[[], Mapping[Tensor, Any]] | None,
    ) -> None:
        super().__init__(like.param_groups, like.defaults)
        self.param_groups = like.param_groups  # also those that the loop adds, which is refused at its next step
        self._make_step, self._updates, self._states = make_step, updates, states

    @property
    def version(self) -> int:
        """Return how many updates the A has had that the model has, of this optimizer's parameters."""
        return self._updates()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Push the gradients as Δ, wait for as long as the policy says, pull A into the same parameters.

        Raises:
            TrainingEnded: the budget is spent; it ends the loop and nothing else.
        """
        if closure is not None:
            raise InputError(
                "optimizer.step(closure): Δ is of one evaluation of the loss; write loss.backward(); optimizer.step(), "
                "and optimizer=paceline.LBFGS where it was torch.optim.LBFGS"
            )
        self._make_step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Refuse it: A's optimizer has the state."""
        del state_dict
        raise InputError(
            "optimizer.load_state_dict() within the loop, or the join block, would not get to A; load the state before "
            "join(model=…, optimizer=…), or write checkpoint='ckpt', resume=True"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the groups, and the state that A's optimizer has.

        Raises:
            InputError: that is at a server.
        """
        if self._states is None:
            raise InputError(
                "optimizer.state_dict(): the state of A's optimizer is at the server, not in this worker; write "
                "checkpoint='ckpt' in train or launch, which saves the model and that state together"
            )
        self.state.update(self._states())
        try:
            return super().state_dict()
        finally:
            self.state.clear()


@dataclass(frozen=True)
class Turns:
    """How an own loop's steps are made.

    Args:
        adopt: waits until the replica may begin its next Δ, and has the model adopt A; TrainingEnded: there is none.
        complete: makes a micro-step of a batch of so many samples, whose gradients are there, and adopts the next A.
        samples: returns how many samples the loop was given for the step; 0: it has data of its own.
        states: returns the optimizer's state for each parameter of A, where this process has it.
    """

    adopt: Callable[[], None]
    complete: Callable[[Batch], None]
    samples: Callable[[], int]
    states: Callable[[], Sequence[Any]] | None = None


class OwnLoop:
    """The gradients and optimizers of one replica's own loop.

    Args:
        context: of the run.
        replica: number of the replica.
        autograd: has the model.
        turns: makes its steps.
        servers: that A is divided among.
    """

    def __init__(
        self, context: RunContext, replica: ReplicaId, autograd: Autograd, turns: Turns, servers: int = 1
    ) -> None:
        _refuse(context)
        context.own_steps = True
        self._context, self._replica, self._autograd, self._turns = context, replica, autograd, turns
        self.module = module = autograd.module
        program = context.job.program
        self._like = like = build_optimizer(program.optimizer, autograd.parameters)
        self._codec = OptionsCodec.of(like)
        self._vector = dict(module.named_buffers())[BUFFER]
        self._first = self._codec.numbers(like), self._codec.others(like)
        """The options before the loop has changed any, those that are no numbers, too."""
        self._whole = servers == 1
        self._evaluator: Evaluator | None = None
        self._loss = math.nan
        autograd.own, autograd.gradients = OwnGradients(self._codec.encode(self._first[0], ())), None
        several = optimizers_of(like)
        if len(several) > 1 and not self._whole:
            raise InputError(f"several optimizers need all of A at one server, but it has {servers}; write servers=1")
        number = {id(parameter): i for i, parameter in enumerate(autograd.parameters)}
        self.optimizers: dict[str, Optimizer] = {}
        """By name; of a single one the name is empty."""
        for part, (name, each) in enumerate(several.items()):
            indices = None
            if len(several) > 1:
                indices = frozenset(number[id(p)] for group in each.param_groups for p in group["params"])
            self.optimizers[name] = self._optimizer(part, each, indices)
        turns.adopt()

    def _optimizer(self, part: int, like: Optimizer, indices: frozenset[int] | None) -> WorkerOptimizer:
        def make_step() -> None:
            self._step(part, indices)

        def updates() -> int:
            return self._codec.updates(self._vector)[part]

        def states() -> Mapping[Tensor, Any]:
            assert self._turns.states is not None, "it is here"
            every = zip(self._autograd.parameters, self._turns.states(), strict=True)
            own = {id(parameter) for group in like.param_groups for parameter in group["params"]}
            return {parameter: state for parameter, state in every if state and id(parameter) in own}

        here = None if self._turns.states is None else states
        return build_optimizer(lambda _: WorkerOptimizer(like, make_step, updates, here), [])

    def backward(self, loss: Tensor) -> None:
        """Compute gradients as ``loss.backward()``, and note the loss: records and policies see it."""
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss = float(loss.detach()) + (0.0 if math.isnan(self._loss) else self._loss)

    def skip(self) -> None:
        """Make a step without samples: this replica has no batch in a round in which others have one."""
        self._turns.samples()  # it counts as one
        self._complete(EMPTY, [], frozenset())

    def _step(self, part: int, indices: frozenset[int] | None) -> None:
        context = self._context
        if math.isnan(self._loss) and "loss" in context.needs:
            raise InputError(
                f"aggregation={text_of(context.policy)} and the optimizer need the loss of each Δ; write "
                "worker.backward(loss) in place of loss.backward()"
            )
        samples = self._turns.samples() or context.job.program.per_replica_batch(context.replicas)
        self._complete(Batch(None, None, samples), [part], indices)

    def _complete(self, batch: Batch, parts: list[int], indices: frozenset[int] | None) -> None:
        options = self._codec.encode(self._checked_options(), parts)
        self._vector.copy_(options)
        self._autograd.own = OwnGradients(options, self._loss, indices)
        self._loss = math.nan
        self._turns.complete(batch)

    def _checked_options(self) -> list[list[float]]:
        """Return the options that are numbers; raise InputError where the loop has changed what does not get to A."""
        numbers, others = self._codec.numbers(self._like), self._codec.others(self._like)
        first, first_others = self._first
        # Schedulers keep figures of their own there, which are no options: what there was must be as it was.
        same = len(others) == len(first_others) and all(
            group.get(name) == value
            for group, known in zip(others, first_others, strict=True)
            for name, value in known.items()
        )
        if not same:
            raise InputError(
                "the loop has added parameters to its optimizer, or changed an option that is no number, of which A's "
                "optimizer learns nothing; make it so from the beginning"
            )
        if numbers == first:
            return numbers
        if self._context.job.program.scheduler is not None:
            raise InputError(
                "the loop has changed options of its optimizer, but Program(scheduler=…) writes them, too; leave one "
                "of the two out"
            )
        if not self._whole:
            raise InputError(
                "the loop has changed options of its optimizer, which several servers have; write servers=1"
            )
        return numbers

    # ------------------------------------------------------------------------------------------------------- evaluation

    def evaluate(self) -> dict[str, float]:
        """Return loss and metrics of the model as it is on the program's test set: ``test_loss``, ``test_accuracy``."""
        program = self._context.job.program
        if program.test is None:
            raise InputError("worker.evaluate() needs test data; write Program(test=…)")
        modes = {module: module.training for module in self.module.modules()}
        try:
            if self._evaluator is None:
                self._evaluator = Evaluator(program, self.module, self._autograd.device)
            self.module.eval()
            return self._evaluator.test()
        finally:
            for module, training in modes.items():
                module.training = training


def check_loop(loop: Any) -> None:
    """Raise InputError for what is no loop: it can't be called, or to call it runs nothing of it."""
    if not callable(loop):
        raise InputError(
            f"loop={loop!r} can't be called; write launch(loop, program, strategy) with def loop(worker): …"
        )
    called = loop, type(loop).__call__
    for kind, instead, is_kind in (
        ("an async function", "def loop(worker): …", inspect.iscoroutinefunction),
        ("an async generator", "def loop(worker): … without yield", inspect.isasyncgenfunction),
        ("a generator", "worker.log({…}) in place of yield", inspect.isgeneratorfunction),
    ):
        if any(map(is_kind, called)):
            name = getattr(loop, "__qualname__", type(loop).__qualname__)
            raise InputError(f"loop={name} is {kind}: to call it runs nothing of it; write {instead}")


def _refuse(context: RunContext) -> None:
    """Raise InputError where own gradients can't become Δ."""
    strategy = context.job.strategy
    for name, given, instead in (
        (f"accumulate={strategy.accumulate}", strategy.accumulate > 1, "call backward() several times before step()"),
        (f"compile={str(strategy.compile).lower()}", bool(strategy.compile), "compile worker.model"),
        ("pull_ahead=true", strategy.pull_ahead, "leave it out"),
        ("shard_optimizer=true", bool(strategy.shard_optimizer), "leave it out"),
        ("noise_scale=True", context.job.noise_scale, "leave it out"),
    ):
        if given:
            raise InputError(
                f"{name} is of steps that Paceline computes, but worker.optimizer takes the loop's own gradients; "
                f"compute with worker.step(batch), or {instead}"
            )
