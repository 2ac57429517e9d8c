"""Replicas of a run that the server waits for: named where they are silent or slow, ended where they are silent."""

from collections.abc import Mapping

from paceline.core.types import ReplicaId, Seconds
from paceline.engine.base import Job
from paceline.engine.replica_pace import ReplicaPace
from paceline.engine.server.messages import Suspect
from paceline.engine.server.server_state import ServerState

# How long a process may take to start, on top of timeout_s.
START_S: Seconds = 60.0


class LateReplicas:
    """Watches the replicas of one run.

    Args:
        job: what is run.
        state: of the run.
    """

    def __init__(self, job: Job, state: ServerState) -> None:
        self._job, self._state = job, state
        self.pace = ReplicaPace(len(state.records), job.suspect_after_s, job.timeout_s)
        self.suspects: tuple[Suspect, ...] = ()
        """Those that main is to end."""
        self.held_back: set[ReplicaId] = set()
        """Those whose Δs wait until the evaluator has caught up."""

    def handled(self, now: Seconds) -> None:
        """Note which replicas compute after a decision."""
        self.pace.handled(self._state.coordinator.computing - self._state.starting.keys(), now)

    def look(self, now: Seconds) -> Mapping[str, str] | None:
        """Find those that are silent or slow, and say so in the run's remarks; return all notes where they are new.

        Raises:
            PacelineError: no replica computes, or none pushes in time.
        """
        state, records, loop = self._state, self._state.records, self._state.loop
        silent, loop.remarks = self.pace.look(
            now,
            lambda r: records[r].excused_s,
            lambda r: records[r].attempt,
            lambda r: r in self.held_back,
        )
        bound, end = START_S + self._job.timeout_s, "the others go on without it" if self._job.joins else "killed"
        reasons = {r: f"silent for {s:.1f} s; {end}" for r, s in silent.items() if self._job.survives_deaths}
        for replica, since in state.starting.items():
            if now - since > bound:
                reasons[replica] = f"did not start within {bound:g} s; {end}"
        self.suspects = tuple(Suspect(r, records[r].incarnation, why) for r, why in reasons.items())
        if state.coordinator.present and not state.starting:
            loop.check_hang(
                now,
                "the server",
                excused_until=lambda r: records[r].excused_s,
                attempt=lambda r: records[r].attempt,
                # Replicas wait for the evaluator; or none has to be there, and who is silent is ended.
                busy=lambda: state.queue.full or self._job.joins,
            )
        notes = self.pace.notes()
        return notes if notes != {kind: state.notes.get(kind) for kind in notes} else None
