"""What ``train`` and ``test`` of a program may be, and what to write instead of anything else."""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from paceline.core.errors import InputError


def check_data(name: str, data: Any, *, of_model: bool = False, collated: bool = False) -> None:
    """Raise InputError if the data are none of what a field of a program may have.

    Args:
        name: of the field, ``train`` or ``test``; the latter has a length.
        data: a map-style dataset, a pair of trees of tensors with as many samples along dim 0, or for ``train`` an
            IterableDataset or a function.
        of_model: whether the model makes its loss, so that samples need be no pairs.
        collated: whether the user's ``collate_fn`` makes batches of samples, which may then be anything.
    """
    if isinstance(data, tuple):
        _check_pair(name, data)
    elif isinstance(data, IterableDataset):
        if name != "train":
            raise InputError(
                f"{name}={type(data).__name__} has no length, but each evaluation is of the same samples; write "
                f"{name}=list(itertools.islice(samples, 1000)), or a map-style dataset"
            )
    elif instead := _instead(name, data, of_model, collated):
        raise InputError(f"{name} is {_kind(data)}, no data set; {instead}")
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if len(data) == 0:
            raise InputError(f"{name} has no samples; pass a dataset with at least one")
    elif name != "train" or not callable(data):
        _refuse(name, data)


def _kind(data: Any) -> str:
    keys = f" of {', '.join(map(str, data))}" if isinstance(data, Mapping) else ""
    return f"a {type(data).__name__}{keys}"


def _instead(name: str, data: Any, of_model: bool, collated: bool) -> str:
    """Return what to write instead of data that look like a data set, and of which samples are something else."""
    if collated and isinstance(data, (Tensor, np.ndarray, list)):
        return ""
    if isinstance(data, Tensor):
        return f"write {name}=torch.utils.data.TensorDataset(tensor)" if of_model else f"write {name}=(inputs, targets)"
    if isinstance(data, np.ndarray):
        return f"write {name}=(torch.from_numpy(inputs), torch.from_numpy(targets))"
    if isinstance(data, Mapping):
        return _instead_of_dict(name, data, of_model)
    if hasattr(data, "iloc"):  # a DataFrame or a Series of pandas, which need not be installed
        return (
            f"write {name}=(torch.tensor(frame[inputs].to_numpy()), torch.tensor(frame[target].to_numpy())) with the "
            "names of its columns"
        )
    if isinstance(data, Iterator):
        return (
            "and can be read only once; write train=function, (replica, replicas, seed) -> batches, which yields them "
            "anew, or an IterableDataset"
        )
    if isinstance(data, (str, bytes)):
        return f"write {name}=, a data set that has been read from there"
    if isinstance(data, list) and data and not (of_model or isinstance(data[0], (tuple, list, Mapping))):
        return f"of which samples would be {type(data[0]).__name__}; write {name}=(inputs, targets), two tensors"
    return ""


def _instead_of_dict(name: str, data: Mapping[Any, Any], of_model: bool) -> str:
    keys = [repr(key) for key in data]
    if all(isinstance(key, int) for key in data) and keys:
        return f"write {name}=list(data.values())"
    if not all(isinstance(value, (Tensor, np.ndarray, list)) for value in data.values()) or not keys:
        return f"write {name}=splits[{keys[0] if keys else repr('train')}], one of its splits"
    if of_model:
        pairs = ", ".join(f"{key}: {name}_dict[{key}][i]" for key in keys)
        return f"write {name}=[{{{pairs}}} for i in range(len({name}_dict[{keys[0]}]))]"
    target = next((key for key in keys if key in ("'labels'", "'label'", "'y'", "'targets'", "'target'")), keys[-1])
    inputs = [key for key in keys if key != target] or keys
    single = f"{name}_dict[{inputs[0]}]"
    several = "{" + ", ".join(f"{key}: {name}_dict[{key}]" for key in inputs) + "}"
    return f"write {name}=({single if len(inputs) == 1 else several}, {name}_dict[{target}])"


def _refuse(name: str, data: Any) -> NoReturn:
    functions = " or a function (replica, replicas, seed) -> iterable of batches" if name == "train" else ""
    raise InputError(
        f"{name}={type(data).__name__} is no map-style dataset (__len__ and __getitem__) and no pair of tensors; write "
        f"{name}=(inputs, targets){functions}"
    )


def _check_pair(name: str, data: tuple[Any, ...]) -> None:
    # What a tokenizer returns is a Mapping, but no dict.
    parts = (dict(part) if isinstance(part, Mapping) else part for part in data)
    tensors = [[leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)] for part in parts]
    if len(data) != 2 or not all(tensors):
        kinds = ", ".join(type(part).__name__ for part in data)
        raise InputError(
            f"{name}=({kinds}) must be a pair of tensors, inputs and targets; write {name}=(inputs, targets); arrays "
            "as torch.from_numpy(array)"
        )
    sizes = {len(tensor) if tensor.dim() else 0 for part in tensors for tensor in part}
    if len(sizes) != 1:
        raise InputError(f"the tensors of {name} have {sorted(sizes)} samples along dim 0; they must have equally many")
    if sizes == {0}:
        raise InputError(f"{name} has no samples; pass tensors with at least one row")
