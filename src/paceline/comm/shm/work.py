"""What a call returns: something to wait for."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.comm.shm import progress
from paceline.comm.shm.inbox import Receive
from paceline.comm.shm.progress import Operation
from paceline.core.types import Seconds


class Works(dist.Work):
    """Several calls that are waited for as one."""

    def __init__(self, works: "Sequence[Work]") -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until all results are there."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        """The outputs of all."""
        return [output for work in self._works for output in work.result()]

    def get_future(self) -> "Future[list[Tensor]]":
        """As that of one."""
        return completed(self.result())


class Work(dist.Work):
    """A call that has been made.

    Args:
        operation: what it does.
        timeout_s: how long ``wait`` waits where it is not told.
        outputs: its results, once it has ended.
        receive: of a receive, where its source will stand.
    """

    def __init__(
        self, operation: Operation, timeout_s: Seconds, outputs: Sequence[Tensor] = (), receive: Receive | None = None
    ) -> None:
        super().__init__()
        self._operation, self.timeout_s, self._outputs, self._receive = operation, timeout_s, outputs, receive

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the results are there; raises where they can't be had, or not within ``timeout``."""
        operation = self._operation
        if not operation.done or operation.error is not None:
            progress.mine().wait(operation, self.timeout_s, timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if not self._operation.done:
            progress.mine().poll()
        return self._operation.done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._operation.done and self._operation.error is None

    def exception(self) -> Exception | None:
        """What went wrong."""
        return self._operation.error

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """What it was made for; waits for it."""
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Of a receive that has ended: where its message came from."""
        source = self._receive.came_from if self._receive else None
        assert source is not None, "no message has been received"
        return source

    _source_rank = source_rank

    def get_future(self) -> "Future[list[Tensor]]":
        """A future that is complete: DDP asks for it at once, and nobody would complete it later."""
        return completed(self.result())


def completed(result: list[Tensor]) -> "Future[list[Tensor]]":
    """A future that has come: nobody would complete it later."""
    future: Future[list[Tensor]] = Future()
    future.set_result(result)
    return future
