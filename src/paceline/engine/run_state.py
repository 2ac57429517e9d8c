"""What of a run is no tensor, as JSON in a checkpoint: counts, the policy's state, positions in the data, history.

It is taken between two decisions of the coordinator. After a resume with the same policy

- replicas that computed at that moment compute the same batches again, from the A of the checkpoint, which others do
  where such a replica is no more,
- those that waited for a decision still wait, and the Δs that the policy held are held again: their tensors are in the
  checkpoint too, ``delta/<replica>/<clock>/<name>``,
- those that had left join again, unless their share of the budget is spent.

Another policy starts anew: all replicas compute from the A of the checkpoint, and Δs that were held count as discarded;
their batches are computed again. So it is where replicas whose Δs were held are no more. A user's own loop is called
anew; its ``worker.batches()`` go on after as many batches as it had made steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import Checkpoint
from paceline.core.data_order import DataPosition
from paceline.core.errors import InputError
from paceline.core.noise_scale import NoiseState
from paceline.core.records import Record, ReplicaExit
from paceline.core.typed_json import of_json, to_json
from paceline.core.types import Clock, ReplicaId, Seconds
from paceline.engine.coordinator_state import CoordinatorState
from paceline.replica.flat_state import FlatState
from paceline.replica.optimizer_state import whole_chunks

# Names of held Δs begin so.
_DELTA = "delta/"


@dataclass(frozen=True)
class HistoryState:
    """The state of a run's history."""

    records: tuple[Record, ...]
    """What had not been evaluated has no test figures."""
    losses: tuple[float, ...]
    """Of the newest Δs."""
    last_snapshot: tuple[int, int] | None
    """Updates and Δs at the newest evaluation point."""
    noise: NoiseState | None
    start_digest: str
    """Digest of A_0."""


@dataclass(frozen=True)
class RunState:
    """The state of a run that is no tensor."""

    seconds: Seconds
    """Training time."""
    spent: Mapping[str, float]
    """Of a budget in each unit: seconds, steps, epochs."""
    per_step: int
    """Micro-steps that count as one step."""
    coordinator: CoordinatorState
    data: DataPosition
    history: HistoryState
    evaluations: tuple[str, float, int]
    """Unit and interval of the evaluation points, and how many were passed."""
    exits: tuple[ReplicaExit, ...]
    """Replicas that ended before they were done."""
    engine: Mapping[str, Any]
    """What only one engine understands."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        value: dict[str, Any] = to_json(self)
        return value

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> "RunState":
        """Return the state whose :meth:`to_json` this is; raise InputError if it is none."""
        state: RunState = of_json(cls, value, "the checkpoint's state of the run")
        if set(state.spent) != {"seconds", "steps", "epochs"} or not state.per_step:
            raise InputError(f"the checkpoint's state of the run can't be read: it has spent {dict(state.spent)}")
        return state

    @property
    def replicas(self) -> int:
        """Number of replicas, P."""
        return len(self.coordinator.positions)


def delta_prefix(replica: ReplicaId, clock: Clock) -> str:
    """Return what the names of the tensors of a Δ begin with that a policy holds."""
    return f"{_DELTA}{replica}/{clock}/"


def delta_chunks(delta: FlatState, replica: ReplicaId, clock: Clock) -> list[TensorChunk]:
    """Return the chunks of such a Δ."""
    return whole_chunks(delta, delta_prefix(replica, clock))


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on; small, for every process opens the checkpoint by itself.

    Args:
        folder: of the checkpoint, which has been verified.
        run: its state.
        optimizer: the optimizer's scalars, options and scheduler.
        fingerprint: of the program that was trained.
        options: whether the optimizer's options are those of the checkpoint; False: the program's own.
        held: names of the Δs that the policy held, as far as they are in the checkpoint.
        dropped: names of options of the run that it goes on without, though nobody has said so.
    """

    folder: Path
    run: RunState
    optimizer: Mapping[str, Any]
    fingerprint: Mapping[str, str]
    options: bool = True
    held: tuple[tuple[ReplicaId, Clock], ...] = ()
    dropped: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "ResumePoint":
        """Return the point at which a checkpoint, which has been verified, was taken.

        Raises:
            InputError: the checkpoint holds no state of a run.
        """
        head = checkpoint.manifest.head
        if "run" not in head:
            raise InputError(
                f"{checkpoint.folder} holds weights alone, no state of a run to go on with; load them where model() "
                "makes the module, or give a folder that checkpoint= wrote"
            )
        optimizer, fingerprint = head.get("optimizer", {}), head.get("fingerprint", {})
        for name, value in (("optimizer", optimizer), ("fingerprint", fingerprint)):
            if not isinstance(value, dict):
                raise InputError(f"{checkpoint.folder} can't be read: its {name} is no object")
        try:
            run = RunState.of_json(head["run"])
        except InputError as error:
            raise InputError(f"{checkpoint.folder} can't be gone on from: {error}") from error
        stored = {tuple(name.split("/")[1:3]) for name in checkpoint.names(_DELTA)}
        names = [(arrival.replica, arrival.clock) for arrival in run.coordinator.held]
        held = tuple((replica, clock) for replica, clock in names if (str(replica), str(clock)) in stored)
        return cls(checkpoint.folder, run, optimizer, fingerprint, held=held)

    @property
    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint, opened anew."""
        return Checkpoint.open(self.folder)
