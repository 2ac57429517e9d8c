"""What tells one program from another: parameters, optimizer, data, code; compared at a resume and between ranks."""

import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset

from paceline.checkpoint.code_digest import PYTHON, call_text, code_digest, digest_of, value_text
from paceline.core.errors import InputError, PacelineError
from paceline.device import exclusive_generator
from paceline.program import Program, as_tensors, is_source, leaves, length

# Samples that are read of a data set, and rows of one that is in tensors.
ITEMS, ROWS = 4, 64

# Longest text of an option, of many groups.
_LONGEST = 200
# Tensors that have a field each; of more there is a digest alone.
_TENSORS = 500
# Differences that a sentence has.
_MOST = 5

# Attributes of every module say nothing about this one.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def fingerprint(program: Program, module: nn.Module) -> dict[str, str]:
    """Return short texts by field that differ where two programs do, and are the same in every process.

    Args:
        program: model, loss, optimizer and data.
        module: that it makes.
    """
    return {
        "seed": str(program.seed),
        "batch size": _batch_size(program),
        "clip_norm": str(program.clip_norm),
        "precision": program.precision,
        **_parameters(module),
        "layers": _layers(module),
        _code_of("model"): _model(module),
        "loss": call_text(program.loss),
        _code_of("loss"): code_digest(program.loss),
        "training set": _data(program.train),
        "order of the data": "as it is" if program.shuffle is False else "shuffled",
        "last batch": "dropped" if program.drop_last else "kept",
    }


def versions() -> dict[str, str]:
    """Return the versions that the processes of a run must have in common."""
    return {"version of Paceline": sys.modules["paceline"].__version__, "version of torch": torch.__version__}


def differences(first: Mapping[str, str], second: Mapping[str, str], names: tuple[str, str]) -> str:
    """Return the fields in which two fingerprints differ, or nothing; what one of them has not can't be compared.

    >>> differences({"seed": "0", "loss": "mse_loss"}, {"seed": "1", "loss": "mse_loss"}, ("rank 0", "rank 1"))
    'seed is 0 in rank 0, but 1 in rank 1'
    """
    found = [
        f"{field} is {value} in {names[0]}, but {second[field]} in {names[1]}"
        for field, value in first.items()
        if field in second and second[field] != value
    ]
    more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return "; ".join([*found[:_MOST], *more])


def _code_of(part: str) -> str:
    """Return the name of a field; bytecode is compared where it is of one version of Python."""
    return f"code of the {part} (Python {PYTHON})"


def _batch_size(program: Program) -> str:
    if program.global_batch_size is not None:
        return f"{program.global_batch_size} over all replicas"
    return f"{program.per_replica_batch(1)} per replica"


def _parameters(module: nn.Module) -> dict[str, str]:
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    texts = {
        name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}{'' if t.requires_grad else ', not trained'}"
        for name, t in tensors.items()
    }
    digest = digest_of(f"{name} {text}" for name, text in texts.items())
    numbers = sum(t.numel() for t in tensors.values())
    return {
        **(texts if len(texts) <= _TENSORS else {}),
        "model": f"{len(texts)} tensors, {numbers:,} numbers, {digest}",
    }


def _layers(module: nn.Module) -> str:
    """Return how many modules there are of each class, as the difference that a reader understands at once."""
    counts = Counter(type(m).__name__ for m in module.modules() if next(m.children(), None) is None)
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _model(module: nn.Module) -> str:
    """Return the digest of the modules' code, how they are nested, and their plain attributes."""
    classes = list(dict.fromkeys(type(m) for m in module.modules()))
    settings = [f"{name} {type(m).__qualname__} {_settings(m)}" for name, m in module.named_modules()]
    hooks = [f for m in module.modules() for f in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return digest_of([code_digest(*classes, *hooks), *settings])


def _settings(module: nn.Module) -> str:
    attributes = vars(module).items()
    own = {name: value for name, value in attributes if name not in _OF_EVERY_MODULE and not name.endswith("rank")}
    return value_text(own)


def optimizer_fields(optimizer: Optimizer) -> dict[str, str]:
    """Return the fields of a program's optimizer, before a scheduler has changed its options; see fingerprint.

    An option has one value, or those of its groups.
    """
    groups = [{name: value_text(value) for name, value in group.items()} for group in optimizer.param_groups]
    texts = {"optimizer": type(optimizer).__qualname__, _code_of("optimizer"): code_digest(type(optimizer))}
    for name in dict.fromkeys(name for group in groups for name in group):
        values = [group.get(name, "absent") for group in groups]
        if name not in ("params", "initial_lr"):  # a scheduler adds the latter
            texts[f"{name} of the optimizer"] = values[0] if len(set(values)) == 1 else _shortened(", ".join(values))
    return texts


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… (digest {digest_of([text])})"


def scheduler_text(scheduler: Any) -> str:
    """Return what tells a program's scheduler from others, or "None"."""
    if scheduler is None:
        return "None"
    return f"{type(scheduler).__qualname__} (digest {digest_of(_scheduler_texts(scheduler))})"


def _scheduler_texts(value: Any) -> Iterator[str]:
    """Yield the settings of a scheduler, of schedulers in it, and the code of functions that it calls."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _scheduler_texts(each)
    elif isinstance(value, LRScheduler):
        yield code_digest(type(value))
        for name, each in vars(value).items():
            if name != "optimizer":
                yield name
                yield from _scheduler_texts(each)
    elif isinstance(value, FunctionType):
        yield code_digest(value)
    else:
        yield value_text(value)


def _data(data: Any) -> str:
    if isinstance(data, IterableDataset):
        return f"{type(data).__qualname__} (digest {digest_of([code_digest(type(data)), value_text(vars(data))])})"
    if is_source(data):
        return f"{call_text(data)} (digest {code_digest(data)})"
    samples = length(data)
    return f"{samples:,} samples ({_sampled(data, samples)})"


def _sampled(data: Any, samples: int) -> str:
    """Return a digest of some samples; of those that are drawn anew at each read, only kinds, shapes and dtypes."""
    pair = as_tensors(data)
    if pair is not None:
        rows = _positions(samples, ROWS)
        return f"digest {digest_of(tensor[rows].cpu() for tensor in leaves(pair))}"
    positions = _positions(samples, ITEMS)
    first, second = _read(data, positions), _read(data, positions)
    for kind, texts in (("digest", _contents), ("digest of shapes", _kinds)):
        if digest_of(texts(first)) == (digest := digest_of(texts(second))):
            return f"{kind} {digest}"
    return "drawn anew at each read"


def _read(data: Any, positions: Sequence[int]) -> list[Any]:
    def sample(position: int) -> Any:
        try:
            return data[position]
        except PacelineError:
            raise
        except Exception as error:
            raise InputError(
                f"sample {position} of a data set of {length(data)}, {type(data).__name__}, can't be read: "
                f"{type(error).__name__}: {error}; correct its __len__ or __getitem__"
            ) from error

    with _fixed_generators():
        return [sample(position) for position in positions]


def _positions(samples: int, count: int) -> list[int]:
    """Return evenly spaced positions with the first and the last.

    >>> _positions(10, 4), _positions(2, 4)
    ([0, 3, 6, 9], [0, 1])
    """
    return sorted({i * (samples - 1) // max(1, count - 1) for i in range(count)})


@contextmanager
def _fixed_generators() -> Iterator[None]:
    """Context manager: seed the generators that data sets draw from, and restore them."""
    python, numpy = random.getstate(), np.random.get_state()
    with exclusive_generator():
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _contents(value: Any) -> Iterator[str]:
    """Yield the leaves of samples as texts; tensors, arrays and pictures by their digests."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield value_text(key)
            yield from _contents(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _contents(each)
    elif isinstance(value, (Tensor, np.ndarray)):
        yield value_text(value.cpu() if isinstance(value, Tensor) else value)
    elif callable(getattr(value, "tobytes", None)):
        yield digest_of([value.tobytes()])
    else:
        yield value_text(value)


def _kinds(samples: Any) -> Iterator[str]:
    """Yield types, shapes and dtypes alone."""
    for sample in samples:
        for each in leaves(sample) or [sample]:
            shape = f"{list(each.shape)} {each.dtype}" if isinstance(each, (Tensor, np.ndarray)) else ""
            yield f"{type(each).__qualname__} {shape}"
