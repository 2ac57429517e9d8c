"""One forward, one backward, with gradients of weights (W) postponed to idle time.

::

    worker 0|0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    worker 1| .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    worker 2| .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    36 of 42 cells are busy: 86 %
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from paceline.core.registry import register
from paceline.schedule.base import Action, Schedule


@final
@register("zero-bubble")
@dataclass(frozen=True)
class ZeroBubble(Schedule):
    """Only gradients of inputs (I) block other workers, those of weights fill gaps: ZB-H1 (Qi et al. 2023, 2401.10241).

    Forwards and I go in the order of 1F1B; worker w postpones W by w micro-batches. With equal parts and m ≥ p, workers
    are idle for (p - 1) · max(F, I, F + I - W): that is the paper's (p - 1)(F + I - W) if W is the fastest of the
    three, and always less than 1F1B's (p - 1)(F + I + W). If parts differ much, a late W can cost more.

    A worker holds at most p micro-batches before their W, the most that 1F1B holds anywhere, and p - w before their I.
    """

    splits_backward: ClassVar[bool] = True

    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        ahead = workers - 1 - worker
        # Slot k: forward k, gradient of inputs p - 1 - w slots later, and of weights p - 1 slots later.
        for k in range(micro_batches + workers - 1):
            if k < micro_batches:
                yield Action(worker, "forward", k)
            if ahead <= k < ahead + micro_batches:
                yield Action(worker, "backward_input", k - ahead)
            if k >= workers - 1:
                yield Action(worker, "backward_weight", k - (workers - 1))
