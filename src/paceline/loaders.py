"""What torch's DataLoader says of a run's data: the data set, how samples make batches, and who reads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data.distributed import DistributedSampler

from paceline.core.errors import InputError

# Arguments of DataLoader that reading samples depends on, with the values that mean nothing else was said.
_DEFAULTS: Mapping[str, Any] = {
    "num_workers": 0,
    "collate_fn": None,
    "pin_memory": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "prefetch_factor": None,
    "persistent_workers": False,
}

# A loop of one's own takes any order.
OWN_LOOP = "for batch in worker.data(loader): worker.step(batch), in a loop of your own (paceline.launch)"


@dataclass(frozen=True)
class LoaderParts:
    """The parts of a DataLoader.

    Args:
        dataset: of the loader; of a SubsetRandomSampler, the Subset that it draws from.
        batch_size: samples of a batch; None: each item of the data set is a batch, or ``own_order`` makes them.
        shuffle: whether samples are permuted; None: the data set has an order of its own, as an IterableDataset has.
        drop_last: whether a last batch that is not full is left out.
        options: the other keyword arguments of DataLoader, without those that are its defaults.
        own_order: the sampler, or batch sampler, that makes another order than these; None: there is none.
    """

    dataset: Any
    batch_size: int | None
    shuffle: bool | None
    drop_last: bool
    options: Mapping[str, Any]
    own_order: Any = None


def parts_of(loader: DataLoader[Any]) -> LoaderParts:
    """Return the parts of a DataLoader; nothing of it is run.

    Of torchdata's StatefulDataLoader they are the same; its state is not among them.

    Raises:
        InputError: the loader's class iterates in a way of its own, or out of order.

    >>> parts_of(DataLoader([1, 2, 3], batch_size=2, shuffle=True))
    LoaderParts(dataset=[1, 2, 3], batch_size=2, shuffle=True, drop_last=False, options={}, own_order=None)
    """
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ and kind.__name__ != "StatefulDataLoader":
        raise InputError(
            f"{kind.__name__} iterates in a way of its own, which can't be read; write "
            "train=lambda replica, replicas, seed: itertools.islice(loader, replica, None, replicas)"
        )
    if not getattr(loader, "in_order", True):
        raise InputError("DataLoader(in_order=False) gives batches in any order; leave in_order out")
    options = {name: getattr(loader, name) for name in _DEFAULTS}
    if options["collate_fn"] in (default_collate, default_convert):
        options["collate_fn"] = None
    if options["prefetch_factor"] == 2:  # torch's own, with workers
        options["prefetch_factor"] = None
    if options["multiprocessing_context"] is not None:  # by name it can be sent to any process
        options["multiprocessing_context"] = loader.multiprocessing_context.get_start_method()
    options = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return LoaderParts(dataset, loader.batch_size, None, loader.drop_last, options)
    sampler, batch_size, drop_last, batches = loader.sampler, loader.batch_size, loader.drop_last, loader.batch_sampler
    if batch_size is None and batches is not None:
        if type(batches) is not BatchSampler:
            return LoaderParts(dataset, None, None, False, options, batches)
        sampler, batch_size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
    if type(sampler) is SubsetRandomSampler:
        dataset, shuffle, own = Subset(dataset, list(sampler.indices)), True, _seeded(sampler)
    else:
        shuffle, own = type(sampler) is RandomSampler, _own_order(sampler, dataset)
    return LoaderParts(dataset, batch_size, None if own is not None else shuffle, drop_last, options, own)


def _own_order(sampler: Any, dataset: Any) -> Any:
    """Return the sampler, if it does more than take all samples once an epoch, permuted or as they are."""
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(dataset):
        return _seeded(sampler)
    return None if type(sampler) is SequentialSampler and len(sampler) == len(dataset) else sampler


def _seeded(sampler: Any) -> Any:
    """Return the sampler, if it draws from a generator of the user's, whose numbers a permutation has not."""
    return None if sampler.generator is None else sampler


def refuse_own_order(name: str, parts: LoaderParts) -> None:
    """Raise InputError if a loader's order is its own.

    Args:
        name: of the field that the loader is given as.
        parts: of the loader.
    """
    own = parts.own_order
    if isinstance(own, DistributedSampler):
        raise InputError(f"{name}= has a DistributedSampler: Paceline divides batches itself; leave the sampler out")
    if getattr(own, "generator", None) is not None and type(own) in (RandomSampler, SubsetRandomSampler):
        raise InputError(
            f"{name}= has a generator=, but the order is drawn from the program's seed; leave generator out and write "
            f"seed=, or {OWN_LOOP}"
        )
    if own is not None:
        makes_batches = parts.batch_size is None and (not isinstance(own, Sampler) or hasattr(own, "batch_size"))
        kind = "batch_sampler" if makes_batches else "sampler"
        raise InputError(
            f"{name}= has a {kind} {type(own).__name__}, whose order a run can't divide and resume; leave it out, or "
            f"write {OWN_LOOP}"
        )


def program_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a program whose ``train`` or ``test`` is a DataLoader, with their parts in its place.

    Args:
        given: the program's fields by name: train, test, batch_size, global_batch_size, shuffle, drop_last and loader.

    Raises:
        InputError: the loader says something else than the fields do, or an order that can't be kept.
    """
    fields = dict(given)
    if isinstance(given["train"], DataLoader):
        parts = parts_of(given["train"])
        refuse_own_order("train", parts)
        if parts.batch_size is None and parts.shuffle is not None:
            raise InputError(
                "train= is a DataLoader whose batch_size=None gives single items of a map-style dataset; write "
                "DataLoader(dataset, batch_size=32), or train=function, (replica, replicas, seed) -> batches"
            )
        fields["train"] = parts.dataset
        said = {"batch_size": parts.batch_size, "shuffle": parts.shuffle, "drop_last": parts.drop_last}
        if given["global_batch_size"] is not None:
            raise InputError(
                f"global_batch_size={given['global_batch_size']}, but train= is a DataLoader with "
                f"batch_size={parts.batch_size} per replica; write train=loader.dataset, or leave global_batch_size out"
            )
        fields |= {name: _agreed(name, given[name], value) for name, value in said.items()}
        options = dict(parts.options)
        if parts.batch_size is None:  # as DataLoader says that each item is a batch
            options["batch_size"] = None
        for name, value in given["loader"].items():
            options[name] = _agreed(name, value, options.get(name, value))
        fields["loader"] = options
    if isinstance(given["test"], DataLoader):
        parts = parts_of(given["test"])
        refuse_own_order("test", parts)
        fields["test"] = parts.dataset
        own, of_train = (options.get("collate_fn") for options in (parts.options, fields["loader"]))
        if own is not of_train and own != of_train:
            raise InputError(
                f"test= is a DataLoader with collate_fn={own!r}, but train= has collate_fn={of_train!r}; give both the "
                "same one"
            )
    return fields


def _agreed(name: str, given: Any, said: Any) -> Any:
    """Return what a loader says of a field, unless the program says otherwise."""
    if given is not None and given is not said and given != said:
        raise InputError(
            f"{name}={given!r}, but train= is a DataLoader with {name}={said!r}; leave {name} out, or write "
            f"DataLoader({name}={given!r})"
        )
    return said
