"""One replica, as the server sees it."""

import asyncio
from collections.abc import Sequence

from paceline.core.mesh import Place
from paceline.core.records import WorkerFigures
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.figures import Figures, told
from paceline.engine.ray.freight import Bytes
from paceline.engine.ray.messages import END, Order, Reply


class Lane:
    """What one replica was sent, and what it told; several in a row may have its name."""

    def __init__(self) -> None:
        self.attempt = self.micro_steps = 0
        """What it was sent A for, in all."""
        self.ready = self.finished = self.dead = False
        """Whether its model is built; whether its loop has ended; whether it has died, and no other is there."""
        self.excused_s: Seconds = 0.0
        self.figures = Figures(0, 0, 0, 0)
        self.step_times: Sequence[Seconds] = ()
        self._before = Figures(0, 0, 0, 0)
        self._answer: asyncio.Future[Reply] | None = None
        self._kept: Reply | None = None
        """What it is told when it next asks."""

    def ask(self) -> asyncio.Future[Reply]:
        """It waits from now on, until the future is answered."""
        self._answer = asyncio.get_running_loop().create_future()
        kept, self._kept = self._kept, None
        if kept is not None:
            self._reply(kept)
        return self._answer

    def send(self, order: Order, arrays: list[Bytes]) -> None:
        """Answer with A."""
        self.attempt = order.attempt
        self.micro_steps += order.micro_steps
        self._reply((order, arrays))

    def dismiss(self) -> None:
        """Answer that training has ended, now or when it asks."""
        self._reply(END)

    def lost(self) -> None:
        """It is dead; another may go on where it has stopped."""
        self._before, self.figures = _sum(self._before, self.figures), Figures(0, 0, 0, 0)
        self._answer = self._kept = None
        self.ready, self.dead, self.excused_s = False, True, 0.0

    def told(self, replica: ReplicaId, parameter_bytes: int, seconds: Seconds) -> WorkerFigures:
        """What those who had its name have measured of themselves."""
        seen = _sum(self._before, self.figures)
        return told(Place(replica), seen, self.step_times, parameter_bytes, seconds)

    def _reply(self, reply: Reply) -> None:
        if self._answer is None or self._answer.done():
            self._kept = reply
        else:
            self._answer.set_result(reply)


def _sum(a: Figures, b: Figures) -> Figures:
    peak = max(a.peak_memory_bytes, b.peak_memory_bytes)
    return Figures(a.steps + b.steps, a.busy_ns + b.busy_ns, a.payload_bytes + b.payload_bytes, peak)
