"""Learning rates for large batches: how large, and how to get there."""

import math
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from paceline.core.errors import InputError, unknown

# Growth of the learning rate with the batch.
Scaling: TypeAlias = Literal["linear", "sqrt"]


def scaled_learning_rate(base: float, batch_size: int, base_batch_size: int, rule: Scaling = "linear") -> float:
    """Return the learning rate for another batch size: base · k, or base · √k, with k = batch_size / base_batch_size.

    ``linear`` keeps the path of SGD: one step on k batches goes as far as k steps on one (Goyal et al. 2017, arXiv
    1706.02677). ``sqrt`` keeps the variance of a step (Krizhevsky 2014, arXiv 1404.5997); it is what LAMB is
    used with (You et al. 2019, arXiv 1904.00962, section 4).

    Args:
        base: the rate that is good with ``base_batch_size``.
        batch_size: samples of one update: replicas · accumulate · batch_size of the program.
        base_batch_size: as above.
        rule: ``linear`` or ``sqrt``.

    Raises:
        InputError: a number that is not above 0, or an unknown rule.

    >>> scaled_learning_rate(0.1, 8192, 256), scaled_learning_rate(0.1, 1024, 256, rule="sqrt")
    (3.2, 0.2)
    """
    for name, value in (("base", base), ("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        if not value > 0:
            raise InputError(f"{name}={value}, but it must be above 0; write scaled_learning_rate(0.1, 1024, 256)")
    if rule not in get_args(Scaling):
        raise unknown("rule", str(rule), get_args(Scaling))
    ratio = batch_size / base_batch_size
    return base * (ratio if rule == "linear" else math.sqrt(ratio))


def warmup(optimizer: Optimizer, steps: int, then: Callable[[Optimizer], LRScheduler] | None = None) -> LRScheduler:
    """Let the learning rate grow in equal parts from lr/steps at the first update to lr at the ``steps``-th.

    ::

        lr                   . o o o       then(optimizer) begins here, at its own first step; without it, lr stays
                         . o
                     . o
                   o
        update     1   2   3   4 ...       steps = 4

    Goyal et al. 2017 (arXiv 1706.02677, section 2.2) take 5 epochs of it, from the rate of the small batch; ``steps``
    counts updates, so 5 epochs are 5 · samples / samples of one update.

    Args:
        optimizer: with its full learning rate.
        steps: updates, at least 1.
        then: what makes the scheduler that takes over.

    Raises:
        InputError: ``steps`` is below 1 or no whole number.

    >>> import functools, torch
    >>> from torch.optim.lr_scheduler import StepLR
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = warmup(optimizer, 4, then=functools.partial(StepLR, step_size=2, gamma=0.1))
    >>> for update in range(8):
    ...     print(f"{optimizer.param_groups[0]['lr']:.2f}", end=" ")
    ...     optimizer.step()
    ...     scheduler.step()
    0.25 0.50 0.75 1.00 1.00 1.00 0.10 0.10
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps={steps}, but it must be a whole number of at least 1; write steps=500")
    ramp = LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1)
    if then is None:
        return ramp
    return SequentialLR(optimizer, [ramp, then(optimizer)], milestones=[steps])
