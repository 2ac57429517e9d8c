"""A training job: the model, its loss, its optimizer and its data, without any parallelism."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, TensorDataset

from paceline.core.errors import InputError
from paceline.device import CPU, moved

# A tensor, or tuples, lists and dicts of trees.
Tree: TypeAlias = Any

LossFunction: TypeAlias = Callable[[Tree, Tree], Tensor]
# (replica, replicas, seed) -> batches of (input, target): data that no one machine holds.
BatchSource: TypeAlias = Callable[[int, int, int], Iterable[tuple[Tree, Tree]]]
Data: TypeAlias = Dataset[Any] | tuple[Tree, Tree]
Precision: TypeAlias = Literal["fp32", "bf16"]


# Threads share torch's generator: two models made at once would take each other's numbers.
_GENERATOR = threading.RLock()


@dataclass(frozen=True)
class Program:
    """One training job, the same under every strategy.

    Args:
        model: makes the module; called under ``seed``, so every strategy starts from the same A_0.
        loss: (output, target) -> scalar, the mean over the batch.
        optimizer: parameters -> torch optimizer, e.g. ``functools.partial(torch.optim.SGD, lr=0.01)``.
        train: a map-style dataset of (input, target), a pair of tensors (inputs, targets) with samples along the first
            dim, or a function (replica, replicas, seed) -> iterable of batches.
        test: as ``train``, a dataset or a pair; absent: no evaluation on unseen data.
        batch_size: samples per replica and micro-step; 32 if neither it nor ``global_batch_size`` is given.
        global_batch_size: samples per update over all replicas and accumulated micro-steps.
        seed: of A_0, of the data order, of dropout and delays.
        scheduler: optimizer -> LRScheduler, stepped once per update of A.
        clip_norm: bound on the Euclidean norm of each combined Δ; absent: no clipping.
        precision: "bf16" runs forward and loss under autocast; A stays as the model made it.
        metrics: name -> (output, target) -> mean over the batch. Absent: ``accuracy`` if the output is one row of
            class scores per integer target, else none.
        loader: keyword arguments for torch's DataLoader (``num_workers``, ``collate_fn``, ...).
        name: for reports.

    Raises:
        InputError: a field has a value that it can't have.

    An input may be a tensor, a tuple (``model(*input)``) or a dict (``model(**input)``); a target any tree of tensors.
    """

    model: Callable[[], nn.Module]
    loss: LossFunction
    optimizer: Callable[[Any], Optimizer]
    train: Data | BatchSource
    test: Data | None = None
    batch_size: int | None = None
    global_batch_size: int | None = None
    seed: int = 0
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    clip_norm: float | None = None
    precision: Precision = "fp32"
    metrics: Mapping[str, Callable[[Tree, Tree], Any]] | None = None
    loader: Mapping[str, Any] = field(default_factory=dict[str, Any])
    name: str = "program"

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise InputError(f"Program({name}={getattr(self, name)!r}) can't be called; {_HINTS[name]}")
        if self.batch_size is not None and self.global_batch_size is not None:
            raise InputError(
                f"batch_size={self.batch_size} and global_batch_size={self.global_batch_size} say the same thing "
                "twice; write one of them"
            )
        for name in ("batch_size", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"{name}={value!r} must be a whole number of samples, at least 1; write {name}=32")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed!r} must be a whole number from 0 to 2^63 - 1; write seed=0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(f"clip_norm={self.clip_norm!r} must be above 0; write clip_norm=1.0 or leave it out")
        if self.precision not in ("fp32", "bf16"):
            raise InputError(f"precision={self.precision!r} is neither 'fp32' nor 'bf16'; write precision='bf16'")
        _check_data("train", self.train, functions=True)
        if self.test is not None:
            _check_data("test", self.test, functions=False)

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

    def seeded(self, seed: int) -> "Program":
        """Return the same job from another start."""
        return replace(self, seed=seed)

    def build(self) -> nn.Module:
        """Return the module with the parameters A_0: the same bits in every process; torch's own seed stays."""
        # The generator's state is restored afterwards, and no other thread draws from it meanwhile.
        with _GENERATOR, torch.random.fork_rng(devices=[]):
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
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, (tuple, list)):
        return module(*inputs)
    return module(inputs)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the fraction of rows whose largest score is the target's class.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).item()
    0.5
    """
    return (output.argmax(dim=-1) == target).double().mean()


def as_tensors(data: Data | BatchSource) -> tuple[Tree, Tree] | None:
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


def is_source(data: Data | BatchSource) -> TypeGuard[BatchSource]:
    """Return whether the data are a function that makes batches rather than a data set."""
    return callable(data) and not hasattr(data, "__getitem__")


def length(data: Data) -> int:
    """Return the number of samples."""
    pair = as_tensors(data)
    return len(leaves(pair)[0]) if pair is not None else len(data)  # type: ignore[arg-type]


_HINTS = {
    "model": "write model=make_model, a function that returns a new nn.Module",
    "loss": "write loss=torch.nn.functional.cross_entropy, or a function (output, target) -> scalar",
    "optimizer": "write optimizer=functools.partial(torch.optim.SGD, lr=0.01)",
}


def _check_data(name: str, data: Any, *, functions: bool) -> None:
    if not isinstance(data, tuple):
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            if len(data) == 0:
                raise InputError(f"{name} has no samples; pass a dataset with at least one")
        elif not (functions and callable(data)):
            raise InputError(
                f"{name}={type(data).__name__} is no map-style dataset (__len__ and __getitem__) and no pair of "
                f"tensors; write {name}=(inputs, targets)"
                + (" or a function (replica, replicas, seed) -> iterable of batches" if functions else "")
            )
        return
    if len(data) != 2 or not all(leaves(part) for part in data):
        kinds = ", ".join(type(part).__name__ for part in data)
        raise InputError(
            f"{name}=({kinds}) must be a pair of tensors, inputs and targets; write {name}=(inputs, targets); arrays "
            "as torch.from_numpy(array)"
        )
    sizes = {len(t) if t.dim() else 0 for t in leaves(data)}
    if len(sizes) != 1:
        raise InputError(f"the tensors of {name} have {sorted(sizes)} samples along dim 0; they must have equally many")
    if sizes == {0}:
        raise InputError(f"{name} has no samples; pass tensors with at least one row")
