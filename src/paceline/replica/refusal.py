"""What is said of a model that can't be captured."""

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from paceline.core.errors import InputError

WAYS_OUT = (
    "write the model as an nn.Sequential of its parts, each of which then runs as it is and is never divided, or train "
    "it with stages=1 shards=1"
)

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_PYTHON = sysconfig.get_paths()["stdlib"]


def not_captured(module: nn.Module, error: BaseException) -> InputError:
    """The error for a model that torch.export gave up on, with the line of the model where it did."""
    frames = [f for e in _chain(error) for f in traceback.extract_tb(e.__traceback__) if is_users(f.filename)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return InputError(
        f"{type(module).__name__} can't be captured as a graph: torch.export stopped{where}: "
        f"{type(error).__name__}: {reason}; change that line, or {WAYS_OUT}"
    )


def is_users(filename: str) -> bool:
    """Whether a file is neither of Python, nor of torch, nor of what captures."""
    installed = "site-packages" in filename or "dist-packages" in filename
    return not filename.startswith(_OURS) and (installed or not filename.startswith(_PYTHON))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from, the outermost first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
