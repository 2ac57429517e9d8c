"""One rank at the start of a run."""

from dataclasses import dataclass, replace

from torch import nn

from paceline.core.mesh import Mesh
from paceline.core.types import ReplicaId
from paceline.engine.setup import Setup
from paceline.engine.team.team import Team
from paceline.replica.state import Layout


@dataclass(frozen=True)
class Here:
    """One rank at the start of a run."""

    setup: Setup
    team: Team
    backend: str
    module: nn.Module
    """With the values of A_0; of this process, though not all of it need lie in its memory."""
    layout: Layout
    """Of A."""
    replica: ReplicaId | None = None
    """The one that is all of the team; None: the team has all replicas."""

    @property
    def mesh(self) -> Mesh:
        """Of the team's ranks."""
        mesh = self.setup.job.strategy.mesh
        return mesh if self.replica is None else replace(mesh, replicas=1)

    @property
    def steps_on_parts(self) -> bool:
        """Whether each rank steps on its part of A, with an optimizer for that."""
        return self.replica is None or self.setup.owns_steps
