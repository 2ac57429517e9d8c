"""What a model does to the tensors that it saves for backward, which its graph does not do."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.core.errors import InputError
from paceline.program import call
from paceline.replica.forms import resized
from paceline.replica.undisturbed import undisturbed


def refuse_saved_hooks(module: nn.Module, inputs: Any, name: str) -> None:
    """Raise InputError where forward has hooks on what it saves, as checkpoint() has to compute it again.

    Args:
        module: in training mode for as long as this takes; left as it is.
        inputs: a batch, as the module is called with it.
        name: of the model.
    """
    with undisturbed(module), _counted() as entered:
        try:
            call(module, resized(inputs, 2))
        except Exception:
            return  # those who capture it try other sizes, and say why none will do
    if entered:
        raise InputError(
            f"{name} calls torch.utils.checkpoint.checkpoint(), or has other hooks on what it saves for backward: a "
            "graph of its operators has none of them, so shards would keep it all; leave checkpoint() out, or write "
            "shards=1"
        )


_ONE_AT_A_TIME = threading.Lock()
"""Of threads that put something in torch's place."""


@contextmanager
def _counted() -> Iterator[list[Any]]:
    """Those of torch's hooks on saved tensors that are entered meanwhile; checkpoint() without reentry is one."""
    entered = list[Any]()
    with _ONE_AT_A_TIME:
        enter = saved_tensors_hooks.__enter__

        def noted(self: Any) -> None:
            entered.append(self)
            enter(self)

        saved_tensors_hooks.__enter__ = noted  # type: ignore[method-assign]
        try:
            yield entered
        finally:
            saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
