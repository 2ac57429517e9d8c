"""A step of a mesh beside torch's: ranks of their own processes, sides by turns, checked against each other before."""

import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kit.crew import Member
from kit.machine import machine
from kit.together import gathered, largest
from kit.turns import Step, timed, turns
from kit.work import Measured
from meshes import Mesh, Size
from sides import ONE, OURS, THEIRS, One, Side, ours
from theirs import Theirs, can
from torch import Tensor

import paceline.comm

CHECKED = 3
"""Steps after which parameters are compared."""

TOLERANCE = 1e-4
"""Parameters are 1 at most; float32 keeps 6e-8 of them at a step. Sums of a few hundred terms in another order, carried
through several layers and steps, differ by some hundred times that."""

MOVED = 1e-3
"""How far some parameter must have gone from A_0."""

MOST = 40
"""Steps of a turn that count."""


class Pace(NamedTuple):
    """How often and for how long all are measured."""

    rounds: int
    turn_s: float


def measure(member: Member, cells: Sequence[tuple[Mesh, str]], size: Size, pace: Pace) -> None:
    """All cells, (mesh, backend), of one number of workers."""
    warnings.simplefilter("ignore", FutureWarning)  # torch is renaming its collectives
    paceline.comm.register()
    for mesh, backend in cells:
        rows = _Cell(member, mesh, backend, size).rows(pace)
        if member.rank == 0:
            member.tell(Measured(rows))


class _Cell:
    def __init__(self, member: Member, mesh: Mesh, backend: str, size: Size) -> None:
        self._member, self._mesh, self._backend, self._size = member, mesh, backend, size
        self._sides: dict[str, Side] = {ONE: One(size)}
        if can(mesh, size):
            self._sides[THEIRS] = Theirs(mesh, size)

    def rows(self, pace: Pace) -> list[dict[str, Any]]:
        """A row for each side; raises ArithmeticError where sides don't end with the same parameters."""
        apart = self._checked()
        steps = max(1, min(MOST, int(pace.turn_s / largest(timed(self._sides[ONE].step)))))
        found: dict[str, list[float]] = {}
        where = f"{self._mesh.strategy}, {self._backend}"

        def loop(step: Step) -> None:
            every = {name: side.step for name, side in self._sides.items()} | {OURS: step}
            found.update(turns(self._member, where, every, pace.rounds, steps))

        ours(self._mesh, self._size, self._backend, (pace.rounds + 1) * (steps + 1), loop)
        return [self._row(side, found, apart.get(side, 0.0)) for side in found]

    def _checked(self) -> Mapping[str, float]:
        def loop(step: Step) -> None:
            for _ in range(CHECKED):
                step()

        for side in self._sides.values():
            loop(side.step)
        run = ours(self._mesh, self._size, self._backend, CHECKED, loop)
        states = {name: side.state() for name, side in self._sides.items()}
        one = states.pop(ONE)
        states[OURS] = {name: run.state[name] for name in one}
        start = dict(self._size.built().named_parameters())
        if max(_apart(start[name].detach(), value) for name, value in one.items()) < MOVED:
            raise ArithmeticError(f"{self._mesh}: no parameter has moved by {MOVED}")
        return {name: self._distance(name, state, one) for name, state in states.items()}

    def _distance(self, side: str, state: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> float:
        if set().union(*gathered(set(state))) != set(one):
            raise ArithmeticError(f"{self._mesh}: {side} has not trained the same parameters as one process")
        found = largest(max(_apart(value, one[name]) for name, value in state.items()))
        if not found <= TOLERANCE:
            raise ArithmeticError(f"{self._mesh}: {side} ended {found:g} from one process; allowed: {TOLERANCE}")
        return found

    def _row(self, side: str, found: Mapping[str, list[float]], apart: float) -> dict[str, Any]:
        return {
            **self._mesh._asdict(),
            "backend": self._backend,
            "side": side,
            "step_ms": f"{1e3 * statistics.median(found[side]):.3f}",
            "of_one": _ratio(found[side], found[ONE]),
            "of_torch": _ratio(found[side], found[THEIRS]) if THEIRS in found else "",
            "difference": f"{apart:.1e}",
            "rounds": len(found[side]),
            **self._size._asdict(),
        } | machine()


def _ratio(times: Sequence[float], others: Sequence[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(times, others, strict=True)):.3f}"


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
