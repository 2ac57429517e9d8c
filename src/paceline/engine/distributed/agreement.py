"""What all ranks must have in common: the job before the first step, and A after each update."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.checkpoint.fingerprint import differences, versions
from paceline.core.errors import PacelineError
from paceline.core.types import Version
from paceline.engine.base import Job
from paceline.engine.spmd.rank_context import RankContext

# Updates of A between two comparisons of its digests. One reads all of A once, and exchanges 8 bytes a rank.
COMPARED_EVERY = 100

_MODULUS = 1 << 52

# Elements that are summed at a time: torch converts them first, which takes eight times as long beyond the caches.
_PIECE = 1 << 16

# Integers of the size of an element.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def check_job(job: Job, start_digest: str, context: RankContext) -> None:
    """Raise PacelineError unless all ranks are about to do the same; all ranks call it together.

    Args:
        job: of this rank.
        start_digest: digest of A_0.
        context: of this rank.
    """
    own = facts(job, start_digest) | {"the checkpoint to go on from": str(job.resume and job.resume.folder)}
    gathered = context.gather(own, "the others' start")
    for rank, values in enumerate(gathered):
        refuse_differences(gathered[0], values, ("rank 0", f"rank {rank}"))


def facts(job: Job, start_digest: str) -> dict[str, str]:
    """Return what ranks must have in common that take part in one run, by name."""
    return {
        **versions(),
        "strategy": str(job.strategy),
        "budget": str(job.budget),
        "checkpoint": str(job.checkpoint),
        "whether there are callbacks": str(job.callbacks),
        **job.fingerprint,
        "digest of A_0": start_digest,
    }


def refuse_differences(one: Mapping[str, str], other: Mapping[str, str], names: tuple[str, str]) -> None:
    """Raise PacelineError unless two ranks have the same facts."""
    if found := differences(one, other, names):
        raise PacelineError(
            f"{found}; all ranks must run one script with the same arguments and data, and model() must draw its "
            "numbers from torch alone"
        )


def sum_of_bits(vectors: Sequence[Tensor]) -> int:
    """Return a digest of tensors that costs one pass over them: the sum of their elements, read as integers.

    >>> sum_of_bits([torch.tensor([1, 2]), torch.tensor([2**52])])
    3
    """
    pieces = (piece for vector in vectors for piece in torch.split(vector.reshape(-1), _PIECE) if piece.numel())
    return sum(int(piece.view(_INTEGERS[piece.itemsize]).sum(dtype=torch.int64)) for piece in pieces) % _MODULUS


class DivergenceCheck:
    """Compares digests of A among the ranks that have the same part of it.

    They compute the same updates of it, so a difference is a fault: of memory or of a processor, of code that writes
    the model's parameters, of an operation whose result depends on more than its operands.

    Args:
        context: of this rank.
        state: its part of A.
        parts: for each rank, what says which part of A it has.
    """

    def __init__(self, context: RankContext, state: Sequence[Tensor], parts: Sequence[tuple[int, int]]) -> None:
        self._context, self._state, self._parts = context, state, parts
        self.compared: Version = 0
        """Version at the newest comparison."""
        self._useful = len(set(parts)) < len(parts)

    def check_if_due(self, version: Version, settle: Callable[[], None]) -> None:
        """Compare after every so many updates; all ranks call it together.

        Args:
            version: of A.
            settle: makes the newest update, which may be under way.

        Raises:
            PacelineError: ranks differ.
        """
        if self._useful and version // COMPARED_EVERY > self.compared // COMPARED_EVERY:
            self.compared = version
            settle()
            self._check(version)

    def _check(self, version: Version) -> None:
        gathered = self._context.gather(sum_of_bits(self._state), "the comparison of A")
        digests = dict(zip(self._context.members, gathered, strict=True))
        differing: list[int] = []
        for part in sorted(set(self._parts)):
            ranks = [rank for rank in digests if self._parts[rank] == part]
            usual = Counter(digests[rank] for rank in ranks).most_common(1)  # of equally many, that of the lower rank
            differing += [rank for rank in ranks if digests[rank] != usual[0][0]]
        if differing:
            raise PacelineError(
                f"after update {version}, rank{'s' * (len(differing) > 1)} {', '.join(map(str, differing))} "
                f"{'have' if len(differing) > 1 else 'has'} other parameters than the ranks with the same part of the "
                "model; something outside the updates has changed them, or a processor or memory is faulty: go on from "
                "a checkpoint that was written before, with resume=True"
            )
