"""Build the model once on each host and map it in all its ranks: no rank needs memory for all of it.

::

    first rank of a host    make() -> shared memory --+
    the others              ... wait                  +--> map it, copy-on-write

A model that can't be pickled as it is, each rank builds for itself.
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
"""Methods by which a module may leave something out when it is pickled."""

Make: TypeAlias = Callable[[SpillAllocator], nn.Module]


@contextlib.contextmanager
def build_once_per_host(make: Make, context: RankContext) -> Iterator[nn.Module]:
    """Context manager: the model, on all ranks, which enter and leave it together. The model outlives it.

    Args:
        make: builds the same model on every rank.
        context: of all ranks.
    """
    registry = context.registry
    first = next(peer for peer in registry.peers if peer.kernel == registry.own.kernel)
    with contextlib.ExitStack() as closing, extended_timeout(context):
        path, own = _build_and_share(make, closing) if first == registry.own else (None, None)
        path = context.gather(path, "the making of A_0")[first.rank]
        module = _map_shared(path) if own is None else own
        yield make(SpillAllocator()) if module is None else module
        context.gather(None, "the others' copy of A_0")


def _build_and_share(make: Make, closing: contextlib.ExitStack) -> tuple[str | None, nn.Module | None]:
    """Return the path of the shared model; if it can't be shared, None and the model for this rank alone."""
    spill = SpillAllocator()
    module = make(spill)
    if any(_pickles_itself(type(part)) for part in module.modules()):
        return None, module
    try:
        shared = share(module, spill)
    except Exception:  # any error of a module that can't be pickled, as of a parametrized one
        return None, module
    closing.callback(shared.close)
    return f"/proc/{os.getpid()}/fd/{shared.fd}", None


def _pickles_itself(kind: type) -> bool:
    """Return whether a module's class decides what of it is pickled: that may be less than all."""
    users = (base for base in kind.__mro__ if base is not object and not base.__module__.startswith("torch."))
    return any(name in vars(base) for base in users for name in STATEFUL)


def _map_shared(path: str | None) -> nn.Module | None:
    """Map the model that the first rank of this host has built; None if another user's or container's."""
    if path is None:
        return None
    with contextlib.suppress(OSError):
        shared = SharedObject(os.open(path, os.O_RDONLY))
        with contextlib.closing(shared):
            module: nn.Module = unpack(shared, at_once=False)
            return module
    return None
