"""A training job: the model, its loss, its optimizer and its data, without any parallelism."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from paceline.core.errors import InputError
from paceline.core.option_checks import check_samples, check_seed
from paceline.data_checks import check_data
from paceline.device import CPU, exclusive_generator, moved
from paceline.loaders import program_fields

# A tensor, or tuples, lists and dicts of trees.
Tree: TypeAlias = Any

LossFunction: TypeAlias = Callable[[Tree, Tree], Tensor]
# (replica, replicas, seed) -> batches of (input, target): data that no one machine holds.
BatchSource: TypeAlias = Callable[[int, int, int], Iterable[tuple[Tree, Tree]]]
Data: TypeAlias = Dataset[Any] | Sequence[Any] | tuple[Tree, Tree]
OptimizerFactory: TypeAlias = Callable[[Any], Optimizer]
Precision: TypeAlias = Literal["fp32", "bf16"]


def no_loss(output: Tree, target: Tree) -> Tensor:
    """Stand for the loss of a program without one: raise InputError."""
    del output, target
    raise InputError("the program has no loss; write Program(loss=…), or compute it in the loop, with worker.optimizer")


def no_data(replica: int, replicas: int, seed: int) -> Iterable[tuple[Tree, Tree]]:
    """Stand for the data of a program without some: raise InputError."""
    del replica, replicas, seed
    raise InputError(
        "the program has no data; write Program(train=…), or worker.data(loader) in place of worker.batches()"
    )


@dataclass(frozen=True)
class Program:
    """One training job, the same under every strategy.

    Args:
        model: makes the module; called under ``seed``, so every strategy starts from the same A_0.
        loss: (output, target) -> scalar, the mean over the batch; ``"model"``: the model makes it of a whole batch, the
            target among its inputs, and returns it as ``output.loss``, ``output["loss"]`` or first of a tuple. Only a
            loop that computes its gradients itself needs none.
        optimizer: parameters -> torch optimizer, e.g. ``functools.partial(torch.optim.SGD, lr=0.01)``. Several for such
            a loop by the names of the submodules whose parameters they have:
            ``{"generator": …, "discriminator": …}``.
        train: a map-style dataset of (input, target) or of dicts, a pair of tensors (inputs, targets) with samples
            along the first dim, an IterableDataset, a DataLoader, whose arguments become the fields below, or a
            function (replica, replicas, seed) -> iterable of batches; see docs/data.md. Only a loop with data of its
            own needs none.
        test: as ``train``, with a length; absent: no evaluation on unseen data.
        batch_size: samples per replica and micro-step; 32 if neither it nor ``global_batch_size`` is given.
        global_batch_size: samples per update over all replicas and accumulated micro-steps.
        seed: of A_0, of the data order, of dropout and delays.
        scheduler: optimizer -> LRScheduler, stepped once per update of A.
        clip_norm: bound on the Euclidean norm of each combined Δ; absent: no clipping.
        precision: "bf16" runs forward and loss under autocast; A stays as the model made it.
        metrics: name -> (output, target) -> mean over the batch. Absent: ``accuracy`` if the output is one row of
            class scores per integer target, else none.
        loader: keyword arguments for torch's DataLoader (``num_workers``, ``collate_fn``, ...).
        shuffle: whether each epoch of a map-style dataset is permuted by ``seed``, the default, or taken as it is.
        drop_last: whether an epoch leaves out the samples that do not fill a batch of every replica; not by default.
        name: for reports.

    Raises:
        InputError: a field has a value that it can't have.

    An input may be a tensor, a tuple (``model(*input)``) or a dict (``model(**input)``); a target any tree of tensors.
    Of a dict that is no pair, ``"labels"`` is the target.
    """

    model: Callable[[], nn.Module]
    loss: LossFunction | Any = no_loss  # Any: "model", of which __post_init__ makes a function
    optimizer: OptimizerFactory | Any = None  # Any: several by name, which only loops have
    train: Data | BatchSource | DataLoader[Any] = no_data
    test: Data | DataLoader[Any] | None = None
    batch_size: int | None = None
    global_batch_size: int | None = None
    seed: int = 0
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    clip_norm: float | None = None
    precision: Precision = "fp32"
    metrics: Mapping[str, Callable[[Tree, Tree], Any]] | None = None
    loader: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shuffle: bool | None = None
    drop_last: bool | None = None
    name: str = "program"

    def __post_init__(self) -> None:
        if isinstance(self.loss, str) and self.loss == "model":
            object.__setattr__(self, "loss", model_loss)
        for name, value in program_fields({name: getattr(self, name) for name in _OF_LOADERS}).items():
            object.__setattr__(self, name, value)
        makes: Any = self.optimizer
        several = isinstance(makes, Mapping) and bool(makes) and all(map(callable, makes.values()))
        for name, kind in (("model", nn.Module), ("optimizer", Optimizer)):
            if isinstance(value := getattr(self, name), kind):
                raise InputError(
                    f"Program({name}=…) is one {type(value).__name__}, but every worker makes its own; {_HINTS[name]}"
                )
        for name in ("model", "loss") if several else ("model", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise InputError(f"Program({name}={getattr(self, name)!r}) can't be called; {_HINTS[name]}")
        if self.batch_size is not None and self.global_batch_size is not None:
            raise InputError(
                f"batch_size={self.batch_size} and global_batch_size={self.global_batch_size} say the same thing "
                "twice; write one of them"
            )
        for name in ("batch_size", "global_batch_size"):
            check_samples(name, getattr(self, name))
        check_seed(self.seed)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(f"clip_norm={self.clip_norm!r} must be above 0; write clip_norm=1.0 or leave it out")
        if self.precision not in ("fp32", "bf16"):
            raise InputError(f"precision={self.precision!r} is neither 'fp32' nor 'bf16'; write precision='bf16'")
        for name in ("shuffle", "drop_last"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise InputError(f"{name}={value!r} is neither True nor False; write {name}=True")
        how = {"of_model": self.model_makes_loss, "collated": "collate_fn" in self.loader}
        check_data("train", self.train, **how)
        if self.test is not None:
            check_data("test", self.test, **how)

    def per_replica_batch(self, replicas: int, accumulate: int = 1, among: str = "replicas") -> int:
        """Return the samples in a batch of a replica; InputError if ``global_batch_size`` can't be split evenly.

        Args:
            replicas: how many share a global batch.
            accumulate: batches of a Δ.
            among: what these are, in the error.
        """
        if self.global_batch_size is None:
            return 32 if self.batch_size is None else self.batch_size
        parts = replicas * accumulate
        if self.global_batch_size % parts:
            near = max(parts, round(self.global_batch_size / parts) * parts)
            raise InputError(
                f"global_batch_size={self.global_batch_size} can't be split evenly over {among}={replicas} × "
                f"accumulate={accumulate} = {parts} parts; write global_batch_size={near}"
            )
        return self.global_batch_size // parts

    @property
    def model_makes_loss(self) -> bool:
        """Return whether the loss is the model's own, ``loss="model"``; a whole batch is its input then."""
        return self.loss is model_loss

    def labels(self, inputs: Tree, target: Tree) -> Tree:
        """Return the target of a batch for metrics: the input ``labels`` where the model makes its loss of them."""
        return inputs.get("labels", ()) if self.model_makes_loss and isinstance(inputs, Mapping) else target

    def without_workers(self) -> "Program":
        """Return the same job, whose batches are read in the process itself."""
        kept = {name: value for name, value in self.loader.items() if name in ("collate_fn", "batch_size")}
        return replace(self, loader=kept)

    def seeded(self, seed: int) -> "Program":
        """Return the same job from another start."""
        return replace(self, seed=seed)

    def build(self) -> nn.Module:
        """Return the module with the parameters A_0: the same bits in every process; torch's own seed stays."""
        with exclusive_generator():
            torch.default_generator.manual_seed(self.seed)
            module: Any = self.model()
        if not isinstance(module, nn.Module):
            raise InputError(
                f"model() returned {type(module).__name__}, not an nn.Module; write model=lambda: MyModule()"
            )
        return module

    def autocast(self, device: str) -> contextlib.AbstractContextManager[Any]:
        """Return the context for forward and loss."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


def call(module: nn.Module | Callable[..., Tree], inputs: Tree) -> Tree:
    """Return ``model(input)``, ``model(*input)`` for a tuple, ``model(**input)`` for a dict.

    >>> call(lambda a, b: a + b, (1, 2)), call(lambda a, b: a + b, {"a": 3, "b": 4}), call(abs, -5)
    (3, 7, 5)
    """
    if isinstance(inputs, Tensor):  # the usual case; to ask for a Mapping takes longer
        return module(inputs)
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, (tuple, list)):
        return module(*inputs)
    return module(inputs)


def model_loss(output: Tree, target: Tree = ()) -> Tensor:
    """Return the loss that a model has made: the output itself, its ``loss``, or the first of a tuple.

    Raises:
        InputError: there is none.

    >>> model_loss({"loss": torch.tensor(0.5), "logits": torch.ones(2)}), model_loss((torch.tensor(0.25), None))
    (tensor(0.5000), tensor(0.2500))
    """
    del target
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if isinstance(output, Mapping):
        loss = output.get("loss", loss)
    elif isinstance(output, (tuple, list)) and loss is None and output:
        loss = output[0]
    if not isinstance(loss, Tensor):
        raise InputError(
            f"loss='model', but the model returned {type(output).__name__} without a loss: neither .loss nor ['loss'], "
            "nor a tuple that begins with it; give it its target in each batch (labels), or write loss=, a function "
            "(output, target) -> scalar"
        )
    return loss


def apart(loss: LossFunction) -> LossFunction:
    """Return a copy of a loss that counts or averages, for calls that training is not to see; a function is itself.

    One that can't be copied is itself, too.
    """
    module = getattr(loss, "__self__", loss)
    shared = {id(p): p for p in module.parameters()} if isinstance(module, nn.Module) else {}
    try:
        return copy.deepcopy(loss, shared)
    except Exception:  # the user's code says what is copied
        return loss


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the fraction of rows whose largest score is the target's class.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).item()
    0.5
    """
    return (output.argmax(dim=-1) == target).double().mean()


def as_tensors(data: Any) -> tuple[Tree, Tree] | None:
    """Return the (inputs, targets) trees of a pair or a TensorDataset of two; None for other data."""
    if isinstance(data, tuple):
        return data[0], data[1]
    if type(data) is TensorDataset and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    return None


def leaves(tree: Tree) -> list[Tensor]:
    """Return all tensors of a tree, depth first."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [t for v in tree.values() for t in leaves(v)]
    if isinstance(tree, (tuple, list)):
        return [t for v in tree for t in leaves(v)]
    return []


def map_tree(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Return the tree with ``function`` applied to each tensor; what is no tensor stays."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {k: map_tree(function, v) for k, v in tree.items()}
    # A namedtuple takes its fields one by one, other sequences take an iterable.
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(function, v) for v in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tree(function, v) for v in tree)
    return tree


def on_device(tree: Tree, device: torch.device) -> Tree:
    """Return the tree with all tensors on a device; where that is the CPU, as it is."""
    return tree if device == CPU else map_tree(functools.partial(moved, device=device), tree)


def is_source(data: Any) -> TypeGuard[BatchSource]:
    """Return whether the data are batches in a row, a function's or an IterableDataset's, rather than a data set."""
    return isinstance(data, IterableDataset) or (callable(data) and not hasattr(data, "__getitem__"))


def length(data: Data) -> int:
    """Return the number of samples."""
    pair = as_tensors(data)
    return len(leaves(pair)[0]) if pair is not None else len(data)  # type: ignore[arg-type]


_HINTS = {
    "model": "write model=lambda: …, a function that returns a new nn.Module",
    "loss": "write loss=torch.nn.functional.cross_entropy, a function (output, target) -> scalar, or loss='model'",
    "optimizer": "write optimizer=functools.partial(torch.optim.SGD, lr=0.01), a function of the parameters",
}

# Fields that a DataLoader may stand for.
_OF_LOADERS = ("train", "test", "batch_size", "global_batch_size", "shuffle", "drop_last", "loader")
