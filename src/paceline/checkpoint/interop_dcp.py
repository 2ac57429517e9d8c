"""Weights and an optimizer's state in the format of ``torch.distributed.checkpoint`` (DCP).

The names are those of ``get_state_dict(model, optimizer)``, nested and with ``flatten_optimizer_state_dict``::

    model.<full name>
    optimizer.state.<full name>.<slot>             exp_avg, step, …
    optimizer.param_groups.<i>.<option>            nested; "params" has the names of the group's parameters
    optimizer.param_groups.<full name>.<option>    flattened

So ``dcp.load`` fills ``{"model": …, "optimizer": …}`` from it, and ``set_state_dict`` takes that.

DCP keeps what is no tensor as pickles, its own ``.metadata`` above all: reading them can run any code.
"""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.checkpoint.base import OPTIMIZER, check_saveable, slot_name
from paceline.checkpoint.interop import (
    Report,
    TensorSpec,
    Transfer,
    no_report,
    open_sound,
    read_specs,
    state_specs,
    write_checkpoint,
)
from paceline.checkpoint.manifest import MANIFEST
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.scalars import is_scalar, options_to_json, scalar_of_json, scalars_to_json
from paceline.core.errors import InputError
from paceline.core.safe_files import check_out, new_folder, open_regular, reading

METADATA = ".metadata"

# What programs call the two, alone or as one application's state.
_MODELS = ("model.", "app.model.")
_OPTIMIZERS = ("optimizer.", "optim.", "app.optimizer.", "app.optim.")


def export_dcp(checkpoint_folder: str | Path, out: str | Path, *, report: Report = no_report) -> Transfer:
    """Write the parameters, buffers and optimizer state of a checkpoint as ``torch.distributed.checkpoint`` does.

    All of it is in memory meanwhile, since torch keeps what it has written until a file is whole.

    Args:
        checkpoint_folder: ``step-<n>``, or the folder of a run's checkpoints, of which the newest sound one counts.
        out: a new folder, which appears whole or not at all.
        report: is told of progress.

    Raises:
        InputError: no checkpoint is sound, or ``out`` exists or can't be written.
    """
    target = check_out(out)
    checkpoint, notes = open_sound(Path(checkpoint_folder))
    report("reading", 0.0)
    specs = state_specs(checkpoint)
    state: dict[str, Any] = {"model": _by_name(specs, read_specs(checkpoint, specs))}
    with reading(checkpoint.folder / MANIFEST):
        optimizer, omitted = _optimizer_state(checkpoint)
    if optimizer:
        state["optimizer"] = optimizer
    tensors = [*state["model"].values(), *_tensors(optimizer.get("state", {}))]
    report("writing", 0.5)
    with new_folder(target) as folder, _torch_errors(target):
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    report("written", 1.0)
    size = sum(tensor.nbytes for tensor in tensors)
    return Transfer(checkpoint.folder, target, len(tensors), size, (*notes, *omitted))


def import_dcp(path: str | Path, out: str | Path, trust: bool = False, *, report: Report = no_report) -> Transfer:
    """Write what ``torch.distributed.checkpoint`` saved as a checkpoint, ``out/step-0``.

    Args:
        path: the folder; tensors are taken from under "model", and, by full parameter name, "optimizer".
        out: a new folder of checkpoints, which appears whole or not at all.
        trust: whether pickles in the folder may be read, which can run any code.
        report: is told of progress.

    Raises:
        InputError: ``trust`` is False, or the folder has no model, is damaged or has a dtype that no checkpoint can
            hold, or ``out`` exists or can't be written.
    """
    source, target = Path(path), check_out(out)
    _check_files(source)
    if not trust:
        raise InputError(
            f"{source / METADATA} is a pickle, and reading it can run any code; if you trust whoever wrote it, write "
            "trust=True, or --trust on the command line"
        )
    with _torch_errors(source):
        contents = _Contents.of(source, FileSystemReader(source).read_metadata())
        scalars = _load(source, contents.scalars)
        head = {"optimizer": contents.optimizer_json(scalars)} if contents.optimizer else {}
    specs = list(contents.tensors)

    def read(batch: Sequence[TensorSpec]) -> list[Tensor]:
        with _torch_errors(source):
            loaded = _load(source, {contents.tensors[spec]: spec.empty() for spec in batch})
        return [loaded[contents.tensors[spec]] for spec in batch]

    folder = write_checkpoint(target, specs, read, report, head)
    return Transfer(source, folder, len(specs), sum(spec.nbytes for spec in specs), contents.notes)


class _Contents(NamedTuple):
    """What is taken of a folder of DCP.

    Args:
        tensors: as they are in a checkpoint, with their keys in the folder.
        scalars: keys of single numbers and of options, with what receives them.
        parameters: names in the model.
        optimizer: what the optimizer's keys begin with; "" if there is none.
        notes: on what is left out.
    """

    tensors: dict[TensorSpec, str]
    scalars: dict[str, Any]
    parameters: frozenset[str]
    optimizer: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, source: Path, metadata: Metadata) -> "_Contents":
        """Sort the keys of a folder."""
        entries = metadata.state_dict_metadata
        model = next((prefix for prefix in _MODELS if any(key.startswith(prefix) for key in entries)), None)
        if model is None:
            tops = ", ".join(sorted({key.partition(".")[0] for key in entries})[:5])
            raise InputError(f'{source} has {tops}, and no model; save {{"model": model.state_dict()}}')
        tensors, scalars, omitted = dict[TensorSpec, str](), dict[str, Any](), list[str]()
        for key, entry in entries.items():
            if key.startswith(model):
                if isinstance(entry, BytesStorageMetadata):
                    omitted.append(key)
                    continue
                check_saveable({key.removeprefix(model): torch.empty(0, dtype=entry.properties.dtype)})
                tensors[_spec(key.removeprefix(model), entry)] = key
        parameters = frozenset(spec.name for spec in tensors)
        optimizer = next((prefix for prefix in _OPTIMIZERS if any(key.startswith(prefix) for key in entries)), "")
        for key, entry in entries.items():
            if not optimizer or not key.startswith(optimizer):
                continue
            parameter, slot = _parameter_and_slot(key.removeprefix(optimizer))
            if key.startswith(f"{optimizer}state.") and parameter not in parameters:
                omitted.append(key)
            elif isinstance(entry, BytesStorageMetadata):
                scalars[key] = None
            elif not entry.size:
                scalars[key] = _spec(key, entry).empty()
            elif key.startswith(f"{optimizer}state."):
                tensors[_spec(slot_name(slot, parameter), entry)] = key
        notes = (f"left out: {', '.join(omitted[:3])}{', …' if len(omitted) > 3 else ''}",) if omitted else ()
        return cls(tensors, scalars, parameters, optimizer, notes)

    def optimizer_json(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Return what of the optimizer's state is no vector, as a checkpoint of a run has it; of no class."""
        by_slot: dict[str, dict[str, Any]] = {}
        options: dict[str, dict[str, Any]] = {}
        for key, value in scalars.items():
            kind, _, rest = key.removeprefix(self.optimizer).partition(".")
            name, _, last = rest.rpartition(".")
            if kind == "state" and is_scalar(value):
                by_slot.setdefault(last, {})[name] = value
            elif kind == "param_groups":
                options.setdefault(name, {})[last] = value
        groups = _groups(options, self.parameters)
        slots = [
            spec.name.removeprefix(OPTIMIZER).partition("/") for spec in self.tensors if spec.name.startswith(OPTIMIZER)
        ]
        owners = {name for _, _, name in slots} | {name for values in by_slot.values() for name in values}
        owners |= {name for group in groups for name in group["params"]}
        return {
            "class": None,  # DCP does not name it
            "steps": max((int(step) for step in by_slot.get("step", {}).values()), default=0),
            "scalars": {slot: scalars_to_json(values, owners) for slot, values in by_slot.items()},
            "groups": [options_to_json(group) for group in groups],
            "parameters": [group["params"] for group in groups],
            "scheduler": None,
        }


def _groups(options: Mapping[str, Mapping[str, Any]], parameters: frozenset[str]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, by the number of each or by the name of each parameter."""
    nested = [dict(group) for group in options.values() if "params" in group]
    if nested:
        return nested if all(name in parameters for group in nested for name in group["params"]) else []
    groups: list[dict[str, Any]] = []
    for name, group in options.items():
        like = next((known for known in groups if known == {**group, "params": known["params"]}), None)
        if like is None:
            groups.append({**group, "params": [name]})
        else:
            like["params"].append(name)
    return groups


def _optimizer_state(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Return the state of the optimizer as ``get_optimizer_state_dict`` does, and what is left out of it."""
    saved = checkpoint.manifest.head.get("optimizer")
    if not saved:
        return {}, []
    tensors = checkpoint.manifest.tensors
    specs = [TensorSpec(name, tensors[name].shape, tensors[name].dtype) for name in checkpoint.names(OPTIMIZER)]
    state: dict[str, dict[str, Any]] = {}
    for name, tensor in _by_name(specs, read_specs(checkpoint, specs)).items():
        slot, _, parameter = name.removeprefix(OPTIMIZER).partition("/")
        state.setdefault(parameter, {})[slot] = tensor
    parameters = saved.get("parameters", [])
    listed = [name for group in parameters for name in group]
    each = [name for values in saved["scalars"].values() for name in values.get("each", {})]
    owners = list(dict.fromkeys([*state, *each, *listed]))
    for slot, values in saved["scalars"].items():
        for name in owners if "all" in values else values["each"]:
            state.setdefault(name, {})[slot] = scalar_of_json(
                values["all"] if "all" in values else values["each"][name]
            )
    if len(saved["groups"]) == 1:
        parameters = [owners]
    if not set(owners) <= {name for group in parameters for name in group}:
        return {"state": state}, [
            "left out: options of the optimizer's groups, since it is not known which are in each"
        ]
    groups = [
        {**{key: _option(value) for key, value in options.items()}, "params": names}
        for options, names in zip(saved["groups"], parameters, strict=True)
    ]
    return {"state": state, "param_groups": groups, **_flattened(groups)}, []


def _flattened(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options of groups by parameter; none if a parameter is called like the number of a group."""
    by_name = {name: group for group in groups for name in group["params"]}
    if any(name.isdecimal() for name in by_name):
        return {}
    return {
        f"param_groups.{name}.{key}": value
        for name, group in by_name.items()
        for key, value in group.items()
        if key != "params"
    }


def _option(value: Any) -> Any:
    return tuple(scalar_of_json(each) for each in value) if isinstance(value, list) else scalar_of_json(value)


def _by_name(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip((spec.name for spec in specs), tensors, strict=True))


def _tensors(state: Mapping[str, Mapping[str, Any]]) -> Iterator[Tensor]:
    return (value for slots in state.values() for value in slots.values() if isinstance(value, Tensor))


def _parameter_and_slot(key: str) -> tuple[str, str]:
    """Return both of a key of the optimizer's state.

    >>> _parameter_and_slot("state.head.weight.exp_avg")
    ('head.weight', 'exp_avg')
    """
    parameter, _, slot = key.partition(".")[2].rpartition(".")
    return parameter, slot


def _spec(name: str, entry: TensorStorageMetadata) -> TensorSpec:
    if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
        raise ValueError(f"the chunks of {name} do not cover it exactly once")
    return TensorSpec.of(name, entry.size, entry.properties.dtype)


def _load(source: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fill a state, by key of the folder."""
    if state:
        load(state, storage_reader=FileSystemReader(source), no_dist=True)
    return state


def _check_files(source: Path) -> None:
    """Require a folder that has a ``.metadata``, and of regular files only: others could block."""
    if not source.is_dir() or not os.path.lexists(source / METADATA):
        raise InputError(f"{source} has no {METADATA}; write a folder that torch.distributed.checkpoint saved")
    for path in (source / METADATA, *source.glob("*.distcp")):
        with reading(path):
            open_regular(path).close()


@contextmanager
def _torch_errors(path: Path) -> Iterator[None]:
    """Turn whatever torch or a pickle raises into an InputError; suppress the warning that there is no group."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except InputError:
        raise
    except (Exception, CheckpointException) as error:  # that is a BaseException
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{path} can't be read or written by torch.distributed.checkpoint: {reason[-1]}") from error
