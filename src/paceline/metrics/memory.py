"""Formulas for the bytes that a worker holds and sends, to compare with measurements.

How many bytes a step moves: the formulas of the sources, to lay beside what was measured.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.core.partitioning import cut_at_borders
from paceline.schedule import Action


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one worker, in bytes; buffers, the batch itself, and what a collective needs for a while are not counted."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory(
    elements: int, *, element_bytes: int = 4, remembers: int = 0, holders: int = 1, activation_bytes: int = 0
) -> Memory:
    """What a worker holds.

    Args:
        elements: |A_w|, parameters of its part of A.
        element_bytes: b.
        remembers: c, 0 of SGD, 1 of SGD with momentum, 2 of Adam and AdamW. Where torch.optim makes the steps, as with
            several groups of parameters, Adam keeps a counter of 4 bytes for each tensor beside these.
        holders: R, among how many that have the same part the optimizer's state is divided; 1: it is not.
        activation_bytes: of what it saves for backward; :func:`peak_saved_bytes` gives those of a pipeline.

    A stage of 23M parameters under Adam, and the same with ``shard_optimizer=true`` and 4 replicas:

    >>> memory(23_000_000, remembers=2).optimizer, memory(23_000_000, remembers=2, holders=4).optimizer
    (184000000, 46000000)
    """
    size = elements * element_bytes
    return Memory(size, size, remembers * element_bytes * stepped(elements, holders), activation_bytes)


def stepped(elements: int, holders: int) -> int:
    """⌊n/R⌋ + n mod R: of how many elements one of R remembers anything, where each element is stepped on alone.

    What is left over, fewer elements than there are holders, all of them step on.

    >>> stepped(280, 2), stepped(229, 2), stepped(14, 4)
    (140, 115, 5)
    """
    return sum(divmod(elements, holders))


def stepped_at_borders(sizes: Sequence[int], holders: int) -> list[int]:
    """The same of each holder, where the optimizer looks at whole tensors.

    Args:
        sizes: elements of each tensor of the part, in order.
        holders: R.

    >>> stepped_at_borders([144, 16, 64, 5], 2)
    [144, 85]
    """
    return [stop - start for start, stop in pairwise(cut_at_borders(sizes, holders))]


def peak_saved_bytes(actions: Iterable[Action], saved: Callable[[Action], int]) -> int:
    """The most that a worker of a pipeline keeps for backward at one time, without recomputation.

    Where all micro-batches are alike it is :func:`~paceline.schedule.in_flight` times what one saves.

    Args:
        actions: what it does in one mini-batch, in its order.
        saved: what is kept from a forward on; where the backward pass is split, also from a backward_input on, for the
            gradients of weights.

    >>> from paceline.schedule import parse
    >>> [peak_saved_bytes(parse("1f1b").actions(worker, 2, 4), lambda forward: 100) for worker in range(2)]
    [200, 100]
    """
    held, most = dict[tuple[int, int], int](), 0
    for action in actions:
        keeps = action.kind in ("forward", "backward_input")
        held[action.stage, action.micro_batch] = saved(action) if keeps else 0
        most = max(most, sum(held.values()))
    return most


def step_payload_bytes(parameters: int, replicas: int, bytes_per_parameter: int = 4) -> int:
    """2·|A|·P·b, in all: each of P replicas sends its Δ to a parameter server and receives A once a step.

    Args:
        parameters: |A|, how many there are.
        replicas: P.
        bytes_per_parameter: b; 2 where gradients and parameters travel in 16 bits.

    The sources' example, ResNet-50 with about 23M float32 parameters on 8 workers, about 1.47 GB a step:

    >>> step_payload_bytes(23_000_000, 8, 4)
    1472000000
    """
    return 2 * parameters * replicas * bytes_per_parameter


def ring_payload_bytes(parameters: int, replicas: int, bytes_per_parameter: int = 4) -> int:
    """2·(P−1)/P·|A|·b, per rank: what each of P ranks sends in a ring all-reduce of its Δ; rounded up.

    Each slice of 1/P leaves a rank P-1 times on the way to its sum and P-1 times on the way of that to all. It stays
    below 2·|A|·b however many ranks there are, where a parameter server's one host carries P times that. With the
    ResNet-50 of the sources' example:

    >>> ring_payload_bytes(23_000_000, 8, 4), ring_payload_bytes(23_000_000, 8, 2)
    (161000000, 80500000)
    """
    return -(-2 * (replicas - 1) * parameters * bytes_per_parameter // replicas)
