"""The bound on deaths of replicas that are replaced: one that dies again and again at one step ends the run."""

from paceline.core.errors import WorkerError
from paceline.core.types import Clock, ReplicaId

# Deaths in a row at one step, after which a replica is replaced no more; and kills, which come from outside.
MOST_DEATHS, MOST_KILLS = 3, 30


class DeathCounter:
    """Counts the deaths of each replica at the step that it is at."""

    def __init__(self) -> None:
        self._deaths: dict[ReplicaId, tuple[Clock, int]] = {}
        """The Δs that were complete at the last death, and how many deaths there were since."""

    def died(self, replica: ReplicaId, completed: Clock, status: str) -> None:
        """Count a death.

        Args:
            replica: that has died.
            completed: its newest Δ that was complete.
            status: cause of death.

        Raises:
            WorkerError: it has died too often at this step to be replaced.
        """
        before, count = self._deaths.get(replica, (-1, 0))
        self._deaths[replica] = completed, count + 1 if completed == before else 1
        most = MOST_KILLS if status.startswith("killed by SIGKILL") else MOST_DEATHS
        if self._deaths[replica][1] > most:
            raise WorkerError(
                f"replica {replica} died {most + 1} times at its step {completed + 1}: {status}; it would die there "
                "again"
            )
