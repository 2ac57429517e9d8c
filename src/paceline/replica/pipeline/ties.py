"""Parameters that parts on several workers hold: their gradients are summed over all of them.

Each sends its own to each other and adds all up in the same order, so all get the same sum to the bit::

    worker 0    g0 ----> 2          g0 + g2
    worker 2    g2 ----> 0          g0 + g2

Where several columns take turns at a stage, all of them have its gradient already; so each of another stage hears it
from one of them.
"""

from collections.abc import Mapping

from torch import Tensor

from paceline.replica.pipeline.messages import Plan
from paceline.replica.pipeline.wire import Wire


class Ties:
    """Those of one worker.

    Args:
        plan: says which parts hold what.
        worker: this one.
        wire: to the others.
    """

    def __init__(self, plan: Plan, worker: int, wire: Wire) -> None:
        self._columns, self._mine, self._wire = plan.columns, plan.columns.column(worker), wire
        holders = {name: sorted({plan.stage_of(part) for part in parts}) for name, parts in plan.tied.items()}
        self._holders = {n: who for n, who in sorted(holders.items()) if self._mine.stage in who and len(who) > 1}

    def __bool__(self) -> bool:
        return bool(self._holders)

    def add_up(self, gradients: Mapping[str, Tensor]) -> None:
        """Let each gradient be the sum over its holders; all of them call it together.

        Args:
            gradients: this worker's, by the parameter's full name.
        """
        mine = self._mine.stage
        others = [(name, other) for name, who in self._holders.items() for other in who if other != mine]
        coming = {
            (name, other): self._wire.expect(
                gradients[name].shape, gradients[name].dtype, self._source(other), _what(name)
            )
            for name, other in others
        }
        own = {name: gradients[name].clone() for name in self._holders}
        for name, other in others:
            for hearer in self._hearers(other):
                self._wire.send(own[name], hearer, _what(name))
        for name, who in self._holders.items():
            first, *rest = (own[name] if each == mine else coming[name, each].take() for each in who)
            gradients[name].copy_(first)
            for each in rest:
                gradients[name].add_(each)
        self._wire.settle()

    def _source(self, stage: int) -> int:
        """From whom of another stage this worker hears."""
        return self._columns.number(self._columns.turn(self._mine, stage))

    def _hearers(self, stage: int) -> list[int]:
        """Who of another stage hear from this worker."""
        return [
            number
            for number in self._columns.same(stage)
            if self._columns.turn(self._columns.column(number), self._mine.stage) == self._mine
        ]


def _what(name: str) -> str:
    return f"the gradient of {name}, which several stages hold"
