"""What of a run is no tensor, as JSON in a checkpoint: counts, the policy's state, positions in the data, history.

It is taken between two decisions of the coordinator. Replicas that compute at that moment compute the same batches
again after a resume, from the A of the checkpoint; those that wait for a decision still wait. The Δs that the policy
holds are listed in ``held``; their tensors are in the checkpoint, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.aggregation.base import Arrival
from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import Checkpoint
from paceline.core.data_order import DataPosition
from paceline.core.errors import InputError
from paceline.core.records import ReplicaPosition
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.replica.flat_state import FlatState
from paceline.replica.optimizer_state import whole_chunks


@dataclass(frozen=True)
class RunState:
    """The state of a run that is no tensor."""

    version: Version
    """Updates of A."""
    seconds: Seconds
    """Training time."""
    spent: Mapping[str, float]
    """Of a budget in each unit: seconds, steps, epochs."""
    per_step: int
    """Micro-steps that count as one step."""
    tally: Mapping[str, Any]
    """Counts of the coordinator."""
    policy: str
    policy_state: Any
    """As :mod:`~paceline.aggregation.state_codec` encodes it."""
    present: Sequence[int]
    """Replicas that take part."""
    computing: Sequence[int]
    """Those that computed, and compute the same again after a resume."""
    positions: Sequence[ReplicaPosition]
    """Of each replica."""
    order: Mapping[str, Any] | None
    """:meth:`DataPosition.to_json`; None where the data are a function."""
    held: Sequence[Arrival] = ()
    """Δs that the policy holds."""
    records: Sequence[Mapping[str, Any]] = ()
    """The history; what had not been evaluated has no test figures."""
    losses: Sequence[float] = ()
    """Of the newest Δs."""
    evaluations: tuple[float, int] = (0.0, 0)
    """Interval of the evaluation points, and how many were passed."""
    last_snapshot: tuple[int, int] | None = None
    """Updates and Δs at the newest evaluation point."""
    noise: Mapping[str, Any] | None = None
    """Averages of the gradient noise scale."""
    start_digest: str = ""
    """Digest of A_0."""
    exits: Sequence[Mapping[str, Any]] = ()
    """Replicas that ended before they were done."""
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What only one engine understands."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        held = [arrival._asdict() | {"observed": dict(arrival.observed)} for arrival in self.held]
        return asdict(self) | {"positions": [list(each) for each in self.positions], "held": held}

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> "RunState":
        """Return the state whose :meth:`to_json` this is.

        Raises:
            InputError: it is none.
        """
        try:
            given = {each.name: value[each.name] for each in fields(cls)}
            replicas = len(given["positions"])
            state = cls(
                **given
                | {
                    "positions": tuple(ReplicaPosition(*map(_count, each)) for each in given["positions"]),
                    "held": tuple(Arrival(**each) for each in given["held"]),
                    "evaluations": (float(given["evaluations"][0]), _count(given["evaluations"][1])),
                    "last_snapshot": given["last_snapshot"] and tuple(map(_count, given["last_snapshot"])),
                    "version": _count(given["version"]),
                    "seconds": float(given["seconds"]),
                    "per_step": _count(given["per_step"]),
                    "spent": {unit: float(given["spent"][unit]) for unit in ("seconds", "steps", "epochs")},
                }
            )
            numbers = [*state.present, *state.computing]
            if not all(isinstance(r, int) and 0 <= r < replicas for r in numbers):
                raise ValueError(f"replicas {numbers} of {replicas}")
            if state.order is not None:
                DataPosition.of_json(state.order)
            return state
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise InputError(f"the checkpoint's state of the run can't be read: {error!r}") from error


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def delta_chunks(delta: FlatState, replica: ReplicaId, clock: Clock) -> list[TensorChunk]:
    """Return the chunks of a Δ that a policy holds."""
    return whole_chunks(delta, f"delta/{replica}/{clock}/")


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on; small, for every process opens the checkpoint by itself.

    Args:
        folder: of the checkpoint, which has been verified.
        run: its state.
        optimizer: the optimizer's scalars, options and scheduler.
        same_policy: whether the policy is the same; another one starts anew.
        options: whether the optimizer's options are those of the checkpoint; False: the program's own.
    """

    folder: Path
    run: RunState
    optimizer: Mapping[str, Any]
    same_policy: bool = True
    options: bool = True

    @classmethod
    def of(cls, checkpoint: Checkpoint, policy: str, *, options: bool = True) -> "ResumePoint":
        """Return the point at which a checkpoint was taken.

        Args:
            checkpoint: verified.
            policy: text of the policy that goes on.
            options: see the class.

        Raises:
            InputError: the checkpoint holds no state of a run.
        """
        head = checkpoint.manifest.head
        if "run" not in head:
            raise InputError(f"{checkpoint.folder} holds no state of a run; give a folder that checkpoint= wrote")
        run = RunState.of_json(head["run"])
        return cls(checkpoint.folder, run, head.get("optimizer", {}), run.policy == policy, options)

    @property
    def replicas(self) -> int:
        """Number of replicas before."""
        return len(self.run.positions)

    def data_position(self) -> DataPosition | None:
        """Return where the run stopped in its data; None where they are a function."""
        return None if self.run.order is None else DataPosition.of_json(self.run.order)

    @property
    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint, opened anew."""
        return Checkpoint.open(self.folder)
