"""A call made of several, each begun once the one before it has ended."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.comm.shm.work import completed


class Relay(dist.Work):
    """One such call. It goes on while somebody waits: for it, or for a later one in its line.

    Args:
        line: of calls that go one after the other; this one joins its end.
        legs: what it is made of, begun as they are asked for.
        outputs: its results, once it has ended.
    """

    def __init__(self, line: "deque[Relay]", legs: Iterator[dist.Work], outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._line, self._legs, self._outputs = line, legs, outputs
        self._now: dist.Work | None = None
        self._done = False
        self._error: BaseException | None = None
        line.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it has ended.

        Raises:
            RuntimeError: it can't end; or ``timeout`` is up, and then it may be waited for again.
        """
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        while not self._done:
            self._line[0]._run(deadline)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        while not self._done and self._line[0]._moves():
            pass
        return self._done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._error

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """What it was made for; waits for it."""
        self.wait()
        return list(self._outputs)

    def get_future(self) -> "Future[list[Tensor]]":
        """A future that is complete."""
        return completed(self.result())

    def _run(self, deadline: float | None) -> None:
        """One leg of the first in line, to its end."""
        leg = self._leg()
        if leg is None:
            return
        try:
            if deadline is None:
                leg.wait()
            else:
                leg.wait(timedelta(seconds=max(1e-6, deadline - time.monotonic())))
        except Exception as error:
            if not leg.is_completed():
                raise
            self._end(error)
        else:
            self._now = None

    def _moves(self) -> bool:
        """Go on to the next leg, if this one has ended."""
        leg = self._leg()
        if leg is None:
            return True
        if not leg.is_completed():
            return False
        self._run(None)
        return True

    def _leg(self) -> dist.Work | None:
        """The one under way; None: there is none left."""
        try:
            self._now = self._now or next(self._legs, None)
        except Exception as error:
            self._end(error)
            return None
        if self._now is None:
            self._end(None)
        return self._now

    def _end(self, error: BaseException | None) -> None:
        self._done, self._error, self._now = True, error, None
        self._line.popleft()
