"""What a lossy compression keeps for later updates, in a checkpoint.

Each rank has a residual of its own, what it has not sent yet; all else (the Q of PowerSGD) is the same on all ranks::

    compression/<its text>/<replica>/residual/<full name of the parameter>     written by each rank
    compression/<its text>/shared/<name>                                       by the first

With another number of replicas, what all of them have not sent yet is divided among those there are, so that the next
updates of A bring all of it: of P residuals e, updates that are means bring Σ e / P. So each of the new replicas,
however many, has their mean; where updates are sums, each has an equal share of their sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.checkpoint.base import COMPRESSION, TensorChunk
from paceline.checkpoint.reader import Checkpoint
from paceline.engine.run_state import ResumePoint


@dataclass(frozen=True)
class KeptResiduals:
    """The tensors of one rank.

    Args:
        text: of the compression.
        residuals: this rank's, by the parameters' full names.
        shared: tensors that all ranks have, by name.
        replica: of this rank.
        replicas: P.
        mean: whether an update is the mean of the replicas' Δs, or their sum.
    """

    text: str
    residuals: Sequence[TensorChunk]
    shared: Mapping[str, Tensor]
    replica: int
    replicas: int
    mean: bool

    def written(self) -> list[TensorChunk]:
        """Return the chunks that this rank writes."""
        first = [TensorChunk.whole(self._shared(name), tensor) for name, tensor in self.shared.items()]
        return [*self._of(self.replica), *(first if self.replica == 0 else ())]

    def restore(self, resume: ResumePoint, checkpoint: Checkpoint) -> None:
        """Read them, if a run with this compression has written them."""
        if not checkpoint.names(kept_prefix(self.text)):
            return
        checkpoint.read_into([TensorChunk.whole(self._shared(name), tensor) for name, tensor in self.shared.items()])
        before = resume.run.replicas
        if before == self.replicas:
            checkpoint.read_into(self._of(self.replica))
            return
        for index, chunk in enumerate(self.residuals):
            chunk.tensor.zero_()
            for replica in range(before):
                chunk.tensor.add_(checkpoint.read(self._of(replica)[index].name))
            chunk.tensor.div_(before if self.mean else self.replicas)

    def _of(self, replica: int) -> list[TensorChunk]:
        prefix = f"{kept_prefix(self.text)}{replica}/residual/"
        return [replace(chunk, name=prefix + chunk.name) for chunk in self.residuals]

    def _shared(self, name: str) -> str:
        return f"{kept_prefix(self.text)}shared/{name}"


def kept_prefix(text: str) -> str:
    """Return what the names of a compression's tensors begin with."""
    return f"{COMPRESSION}{text}/"
