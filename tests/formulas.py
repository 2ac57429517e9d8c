"""Formulas of the sources, to compare with measurements: memory and payload of a worker, and costs of a batch size.

φ is the noise scale, and B the samples of an update (McCandlish et al. 2018, arXiv 1812.06162, section 2; φ stands for
B_crit)::

    updates needed     S = S_min · (1 + φ/B)       samples needed     E = E_min · (1 + B/φ)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.core.noise_scale import efficiency
from paceline.core.partitioning import cut_at_borders
from paceline.schedule import Action


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one worker, in bytes, without buffers, the batch itself, and temporary memory of collectives."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory(
    elements: int, *, element_bytes: int = 4, remembers: int = 0, holders: int = 1, activation_bytes: int = 0
) -> Memory:
    """Return the memory of a worker.

    Args:
        elements: |A_w|, parameters of its part of A.
        element_bytes: b.
        remembers: c, 0 of SGD, 1 of SGD with momentum, 2 of Adam and AdamW. With torch.optim, as for several groups of
            parameters, Adam keeps a counter of 4 bytes for each tensor in addition.
        holders: R, the workers with the same part among which the optimizer's state is divided; 1: it is not.
        activation_bytes: saved for backward; :func:`peak_saved_bytes` returns those of a pipeline.

    A stage of 23M parameters under Adam, and the same with ``shard_optimizer=true`` and 4 replicas:

    >>> memory(23_000_000, remembers=2).optimizer, memory(23_000_000, remembers=2, holders=4).optimizer
    (184000000, 46000000)
    """
    size = elements * element_bytes
    return Memory(size, size, remembers * element_bytes * stepped(elements, holders), activation_bytes)


def stepped(elements: int, holders: int) -> int:
    """Return ⌊n/R⌋ + n mod R: the elements of which one of R keeps state, where each element is updated by itself.

    The remainder, fewer elements than there are holders, is updated by all of them.

    >>> stepped(280, 2), stepped(229, 2), stepped(14, 4)
    (140, 115, 5)
    """
    return sum(divmod(elements, holders))


def stepped_at_borders(sizes: Sequence[int], holders: int) -> list[int]:
    """Return the same for each holder, where the optimizer updates whole tensors.

    Args:
        sizes: elements of each tensor of the part, in order.
        holders: R.

    >>> stepped_at_borders([144, 16, 64, 5], 2)
    [144, 85]
    """
    return [stop - start for start, stop in pairwise(cut_at_borders(sizes, holders))]


def peak_saved_bytes(actions: Iterable[Action], saved: Callable[[Action], int]) -> int:
    """Return the peak of what a worker of a pipeline keeps for backward, without recomputation.

    With equal micro-batches it is :func:`~paceline.schedule.in_flight` times the activations of one.

    Args:
        actions: of the worker in one mini-batch, in its order.
        saved: bytes kept from a forward on; where the backward pass is split, also from a backward_input on, for the
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
    """Return 2·|A|·P·b, in all: each of P replicas sends its Δ to a parameter server and receives A once a step.

    Args:
        parameters: |A|.
        replicas: P.
        bytes_per_parameter: b; 2 where gradients and parameters travel in 16 bits.

    The sources' example, ResNet-50 with about 23M float32 parameters on 8 workers, about 1.47 GB a step:

    >>> step_payload_bytes(23_000_000, 8, 4)
    1472000000
    """
    return 2 * parameters * replicas * bytes_per_parameter


def ring_payload_bytes(parameters: int, replicas: int, bytes_per_parameter: int = 4) -> int:
    """Return 2·(P−1)/P·|A|·b: the bytes that each of P ranks sends in a ring all-reduce of its Δ; rounded up.

    Each slice of 1/P leaves a rank P-1 times on the way to its sum and P-1 times on the way of that to all. It stays
    below 2·|A|·b for any number of ranks, where a parameter server's host moves P times that. With the
    ResNet-50 of the sources' example:

    >>> ring_payload_bytes(23_000_000, 8, 4), ring_payload_bytes(23_000_000, 8, 2)
    (161000000, 80500000)
    """
    return -(-2 * (replicas - 1) * parameters * bytes_per_parameter // replicas)


def steps_factor(noise_scale: float, batch: float) -> float:
    """Return the updates that training needs, relative to the minimum over all batch sizes: 1 + φ/B.

    Args:
        noise_scale: φ, in samples.
        batch: B, samples of one update.

    >>> steps_factor(100.0, batch=100), steps_factor(100.0, batch=400)
    (2.0, 1.25)
    """
    return 1 + noise_scale / batch


def examples_factor(noise_scale: float, batch: float) -> float:
    """Return the samples that training needs, relative to the minimum over all batch sizes: 1 + B/φ.

    Args:
        noise_scale: φ, in samples; without noise one sample suffices.
        batch: B, samples of one update.

    >>> examples_factor(100.0, batch=100), examples_factor(100.0, batch=25)
    (2.0, 1.25)
    """
    return 1 + batch / noise_scale if noise_scale else math.inf


def goodput(samples_per_s: float, noise_scale: float, batch: float, reference: float) -> float:
    """Return throughput · efficiency (Pollux): samples per second that would learn as fast in batches of ``reference``.

    >>> goodput(1000.0, 100.0, batch=100, reference=0)
    500.0
    """
    return samples_per_s * efficiency(noise_scale, batch, reference)
