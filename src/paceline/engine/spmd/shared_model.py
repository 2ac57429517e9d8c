"""A model made once on each host and mapped by all ranks there: no worker of a replica needs room for all of it.

::

    first rank of a host    make() -> parcel --+
    the others              ... wait           +--> map it, copy-on-write

A model that can't travel as it is, each rank makes for itself.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeAlias

from torch import nn

from paceline.comm.shared_memory import SpillAllocator
from paceline.comm.shared_pickle import SharedObject, share, unpack
from paceline.engine.spmd.rank_context import RankContext, extended_timeout

STATEFUL = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__")
"""Methods by which a module may leave something behind when it travels."""

Make: TypeAlias = Callable[[SpillAllocator], nn.Module]


@contextlib.contextmanager
def build_once_per_host(make: Make, context: RankContext) -> Iterator[nn.Module]:
    """The model, on all ranks; they enter and leave it together. It stays good afterwards.

    Args:
        make: the same model wherever it is called.
        context: all ranks.
    """
    registry = context.registry
    first = next(peer for peer in registry.peers if peer.kernel == registry.own.kernel)
    with contextlib.ExitStack() as closing, extended_timeout(context):
        where, own = _offered(make, closing) if first == registry.own else (None, None)
        where = context.gather(where, "the making of A_0")[first.rank]
        found = _found(where) if own is None else own
        yield make(SpillAllocator()) if found is None else found
        context.gather(None, "the others' copy of A_0")


def _offered(make: Make, closing: contextlib.ExitStack) -> tuple[str | None, nn.Module | None]:
    """Where others find what this rank has made, as a path; if they can't, the model for this rank alone."""
    spill = SpillAllocator()
    module = make(spill)
    parcel = _shipped(module, spill)
    if parcel is None:
        return None, module
    closing.callback(parcel.close)
    return f"/proc/{os.getpid()}/fd/{parcel.fd}", None


def _shipped(module: nn.Module, spill: SpillAllocator) -> SharedObject | None:
    if any(_tells_by_itself(type(part)) for part in module.modules()):
        return None
    with contextlib.suppress(Exception):  # whatever a module raises that can't be pickled, as a parametrized one does
        return share(module, spill)
    return None


def _tells_by_itself(kind: type) -> bool:
    """Whether a module's class says what of it is to be sent: that may be less than all."""
    users = (base for base in kind.__mro__ if base is not object and not base.__module__.startswith("torch."))
    return any(name in vars(base) for base in users for name in STATEFUL)


def _found(where: str | None) -> nn.Module | None:
    """What the first rank of this host has made, where that can be read."""
    if where is None:
        return None
    with contextlib.suppress(OSError):
        parcel = SharedObject(os.open(where, os.O_RDONLY))
        with contextlib.closing(parcel):
            module: nn.Module = unpack(parcel, at_once=False)
            return module
    return None
