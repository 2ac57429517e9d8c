"""A worker as its loop sees it: batches and steps of Paceline's, or a model and an optimizer for the loop's own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import InputError
from paceline.core.types import ReplicaId
from paceline.engine.base import Logged, LoopEvent, StopAsked
from paceline.engine.own_loop import OwnLoop
from paceline.engine.run_context import RunContext
from paceline.replica.autograd import step_seed
from paceline.replica.base import EMPTY, Batch, as_batch
from paceline.replica.divided_loader import ReplicaLoader, divided, samples_of


class TrainingEnded(Exception):  # noqa: N818 (an end, not an error)
    """Raised by what would make a further step after the last; a loop may let it pass, it ends the loop, no more."""


class Worker(ABC):
    """One replica, as its loop sees it.

    >>> def loop(worker):
    ...     for batch in worker.batches():
    ...         loss = worker.step(batch)

    A loop that computes its gradients itself, in any way, has the model and a torch optimizer:

    >>> def own_loop(worker):
    ...     model, optimizer = worker.model, worker.optimizer
    ...     for inputs, targets in worker.data(loader):
    ...         optimizer.zero_grad()
    ...         loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    ...         loss.backward()
    ...         optimizer.step()
    """

    def __init__(self, context: RunContext, replica: ReplicaId, report: Callable[[LoopEvent], None]) -> None:
        self._report = report
        """Sends to the process that the user started."""
        self.replica, self.replicas = replica, context.replicas
        self._context = context
        self._share = (0, 1) if context.job.joins else (replica, self.replicas)
        """Which part this replica has of a loader, and of how many: who joins by himself has one of his own."""
        self._steps = self._samples = 0
        """Steps of the loop, and samples that it was given since the last one."""
        self._own: OwnLoop | None = None
        self._given: nn.Module | None = None
        """The script's own module; None: the engine's."""
        self._epoch = 0
        """Passes over loaders that have begun."""
        self._read_once: dict[int, tuple[ReplicaId, Any]] | None = None
        """Iterators by id, and whose they are, where the loops of all replicas have the same objects."""
        self._dealt = False
        """Whether a pass over the run's batches has come to its end: there are no more."""

    @abstractmethod
    def _open(self) -> OwnLoop:
        """Return what makes steps of the loop's own gradients, once the model has A."""

    @property
    def own(self) -> OwnLoop:
        """What makes steps of the loop's own gradients.

        Raises:
            InputError: the replica has several workers, or the strategy is of steps that Paceline computes.
            TrainingEnded: the budget is spent.
        """
        if self._own is None:
            self._own = self._open()
        return self._own

    def use(self, module: nn.Module) -> None:
        """Have a script's own module, of the same structure, be the one that is trained; before the first step."""
        self._given = module

    @property
    def model(self) -> nn.Module:
        """This replica's model; its parameters are A as the policy lets this replica see it."""
        return self.own.module

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, of torch's class: ``step()`` pushes the gradients as Δ, waits as the policy says, pulls A.

        ``zero_grad``, ``param_groups`` and schedulers are as everywhere; what is written to its groups, a learning
        rate say, goes with each Δ, and the update takes the mean of its Δs'. Its state is with A.

        Raises:
            InputError: the program has several; and as :attr:`own`.
        """
        optimizers = self.own.optimizers
        if len(optimizers) > 1:
            raise InputError(f"the program has several optimizers; write worker.optimizers[{next(iter(optimizers))!r}]")
        return next(iter(optimizers.values()))

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers of ``Program(optimizer={…})`` by name; each has a Δ and a version of its own."""
        return self.own.optimizers

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer's first group."""
        return float(next(iter(self.own.optimizers.values())).param_groups[0]["lr"])

    def backward(self, loss: Tensor) -> None:
        """Compute gradients as ``loss.backward()``, and let records, the display and policies see the loss.

        Args:
            loss: scalar; several before one step add up.
        """
        self.own.backward(loss)

    def log(self, values: Mapping[str, float]) -> None:
        """Give figures to the callbacks of the run, as they come: ``on_log``; they are of this replica's newest step.

        Args:
            values: numbers, or tensors of one element, by name.
        """
        if not isinstance(values, Mapping):
            raise InputError(f"worker.log({values!r}) has no names; write worker.log({{'loss': loss}})")
        numbers = dict[str, float]()
        for name, value in values.items():
            try:
                numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError) as error:
                what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise InputError(
                    f"worker.log({{{name!r}: …}}) is {what}, no number; write worker.log({{{name!r}: number}}), of a "
                    "tensor its mean for instance"
                ) from error
        self._report(Logged(self.replica, self._steps, numbers))

    def stop(self, reason: str) -> None:
        """Ask to end training on all replicas, as a budget that is spent does; this loop goes on until then.

        Args:
            reason: for ``summary["stopped"]``.
        """
        self._report(StopAsked(self.replica, reason))

    def evaluate(self) -> dict[str, float]:
        """Return loss and metrics of the model as it is on the program's test set: ``test_loss``, ``test_accuracy``.

        Raises:
            InputError: the program has no test set.
        """
        return self.own.evaluate()

    def data(self, loader: Iterable[Any]) -> ReplicaLoader:
        """Return this replica's batches of a loader of your own: the r-th of P, then each P-th, in each pass over it.

        Sampler, ``collate_fn`` and the loader's workers are kept, and each batch is one replica's. What samplers draw
        is the same on all replicas and differs from pass to pass; with one replica the loader is iterated as it is.
        A replica that has no batch in the last round makes a step without samples in its place, if its loop makes a
        step for each batch. Who has joined a server by its address knows no others, and has all batches of its loader.

        Args:
            loader: a DataLoader, or an iterable that gives the same batches on all replicas.

        Raises:
            InputError: it can be read once, and another replica's loop of this process reads the same one.
        """
        if self._read_once is not None and isinstance(loader, Iterator):
            owner, _ = self._read_once.setdefault(id(loader), (self.replica, loader))
            if owner != self.replica:
                kind = type(loader).__name__
                raise InputError(
                    f"worker.data({kind}) can be read once, but the loops of replicas {owner} and {self.replica} have "
                    "the same one, and would take each other's batches; write worker.data(list(batches)), or make the "
                    f"{kind} inside the loop"
                )
        return ReplicaLoader(loader, *self._share, self._batches_of)

    def _batches_of(self, loader: Iterable[Any]) -> Iterator[Any]:
        seed = step_seed(self._context.job.program.seed, 0, self._epoch)
        self._epoch += 1
        batches, before = 0, self._steps
        for batch in divided(loader, *self._share, seed):
            if batch is not None:
                batches += 1
                self._samples += samples_of(batch)
                yield batch
            elif self._steps - before == batches:
                self._skip()

    def _skip(self) -> None:
        """Make a step without samples: this replica has no batch in a round in which others have one."""
        if self._own is None:
            self.step(EMPTY)
        else:
            self._own.skip()

    def _taken_samples(self) -> int:
        samples, self._samples = self._samples, 0
        self._steps += 1
        return samples

    @property
    @abstractmethod
    def going(self) -> bool:
        """Return whether there is a further step to make; waits until that is decided."""

    @abstractmethod
    def _next_batch(self) -> Batch:
        """Return this replica's next batch, once a step on it is granted."""

    def batches(self) -> Iterator[Batch]:
        """Yield this replica's batches, for as long as the budget lasts.

        Raises:
            TrainingEnded: it was spent when another pass over them has ended.
        """
        if self._dealt:
            raise TrainingEnded
        while self.going:
            batch = self._next_batch()
            if batch.samples or self._own is None:
                self._samples += batch.samples
                yield batch
            else:
                self._skip()
        self._dealt = True

    @abstractmethod
    def _step(self, batch: Batch) -> float:
        """Make one micro-step of Paceline's, and return its loss."""

    def step(self, batch: Any) -> float:
        """Make one step of the equation: pull A, compute Δ, push it.

        Args:
            batch: from :meth:`batches`, or (input, target) with samples along dim 0.

        Returns:
            The mean loss over the batch; NaN where the step was cancelled.

        Raises:
            TrainingEnded: the budget is spent.
        """
        if self._own is not None:
            raise InputError(
                "a loop makes its steps with worker.step(batch), or with gradients of its own and worker.optimizer; "
                "write one of them"
            )
        if not self.going:
            raise TrainingEnded
        self._taken_samples()
        return self._step(as_batch(batch, whole=self._context.job.program.model_makes_loss))
