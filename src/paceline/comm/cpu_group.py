"""What torch.distributed asks of a group that is written in Python."""

# mypy: disable-error-code="override, assignment"
# torch's stubs give each method several signatures and each name one of its own; torch calls the first, by all names.

from typing import Any

import torch
import torch.distributed as dist


class CpuGroup(dist.ProcessGroup):
    """A group of CPU ranks that keeps its own names, since it registers no backend that would.

    Args:
        rank: mine.
        size: how many ranks there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # its stub lacks the one for subclasses
        self._name = self._description = ""

    @property
    def _device_types(self) -> list[torch.device]:
        """DCP and object collectives ask it where to put what they send."""
        return [torch.device("cpu")]

    def _get_backend(self, _device: Any) -> Any:
        return self

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description
