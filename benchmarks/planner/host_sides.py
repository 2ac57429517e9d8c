"""One process, two replicas, two stages, two shards: what is predicted of each, and runs of each."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from kit.machine import machine
from kit.sheet import Row, Sheet

import paceline
from paceline.planner.base import Plan
from paceline.planner.program.plans import PREDICTED, ProgramPlans, plans_here, predict_from_components
from paceline.planner.program.profile import kind
from paceline.planner.search.objective import Objectives

SIDES = ("alone", "replicas", "stages", "shards")
"""Kinds of replica; of each the best plan."""

LEAST_STEPS, MOST_STEPS = 10, 2000

WORKERS = 2


class Sides:
    """Of one model.

    Args:
        name: of the model.
        program: that trains it.
        seconds: that a run is to train.
    """

    def __init__(self, name: str, program: paceline.Program, seconds: float) -> None:
        self.name, self._program, self._seconds = name, program, seconds

    def predicted(self, known: Sheet) -> Iterator[dict[str, Any]]:
        """A row for each side that can be had; none where they are known."""
        if any(known.find(self.name, side) for side in SIDES):
            return
        found = plans_here(self._program, Objectives(workers=WORKERS))
        by_closed_forms = plans_here(self._program, Objectives(workers=WORKERS), found.profile, predicted=0).plans
        closed = {str(plan.strategy): plan for plan in by_closed_forms}
        ranked = [plan for plan in found.plans if plan.arrangement.recompute == "none" and not plan.why_not]
        sides: dict[str, Plan] = {}
        for plan in ranked:
            if plan.arrangement.workers in (1, WORKERS):
                sides.setdefault(kind(plan.arrangement), plan)
        for side in SIDES:
            if side in sides:
                yield from self._told(side, sides[side], closed, found)

    def _told(self, side: str, plan: Plan, closed: Mapping[str, Plan], found: ProgramPlans) -> Iterator[dict[str, Any]]:
        """Predicted from its pieces, if it has not been."""
        plan = (
            plan
            if plan.provenance["compute"] == PREDICTED
            else predict_from_components([plan], self._program, found.profile)[0]
        )
        if plan.why_not:
            print(f"{self.name}, {plan.strategy}: {plan.why_not}", file=sys.stderr)
        else:
            chosen = plan.strategy == found.plans[0].strategy
            run = found.profile.runs.get(side)
            ran = run is not None and run.arrangement == plan.arrangement
            yield self._row(side, plan, closed[str(plan.strategy)], chosen) | {"ran": int(ran)}

    def run(self, row: Row) -> dict[str, Any]:
        """One run of a side."""
        steps = max(LEAST_STEPS, min(MOST_STEPS, round(self._seconds / float(row["step_s"]))))
        words: dict[str, Any] = {"steps": steps, "evaluate_every": steps, "progress": False}
        summary = paceline.train(self._program, row["strategy"], **words).summary
        return {
            "step_s": summary["step_time_s"],
            "held_bytes": max(summary["peak_memory_bytes"]),
            "parameter_bytes": max(summary["parameter_bytes"]),
            "steps": steps,
        }

    def _row(self, side: str, plan: Plan, closed: Plan, chosen: bool) -> dict[str, Any]:
        most = plan.cost.peak
        return {
            "model": self.name,
            "side": side,
            "strategy": str(plan.strategy),
            "step_s": plan.cost.step_s,
            "low_s": plan.low_s,
            "high_s": plan.high_s,
            "closed_s": closed.cost.step_s,
            "held_bytes": round(most.total),
            "parameter_bytes": round(most.parameters),
            "chosen": int(chosen),
            **machine(),
        }
