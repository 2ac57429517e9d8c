"""Plans as JSON: numbers in seconds, bytes and samples."""

from dataclasses import asdict
from typing import Any

from paceline.planner.answer import PlanReport
from paceline.planner.base import Arrangement, Plan, merged
from paceline.planner.explain import Curve
from paceline.planner.multi_job import Shared, SharedJob, WorkerDivision
from paceline.planner.search import carried

EXPOSED = ("shards", "stages", "replicas")
"""Terms of a step that are communication."""


def plan_json(plan: Plan, program: str, devices_per_host: int) -> dict[str, Any]:
    """Of one."""
    cost, step_s = plan.cost, plan.cost.step_s
    return {
        "strategy": None if plan.strategy is None else str(plan.strategy),
        "command": line_of(plan, program, devices_per_host),
        "arrangement": asdict(plan.arrangement) | {"workers": plan.arrangement.workers},
        "step_s": step_s,
        "low_s": plan.low_s,
        "high_s": plan.high_s,
        "samples_per_s": plan.samples_per_s,
        "utilisation": plan.utilisation,
        "bubble": cost.terms["bubble"] / step_s,
        "exposed_communication": exposed(plan),
        "terms_s": dict(cost.terms),
        "peak_bytes": cost.most.total,
        "memory_bytes": [asdict(held) | {"total": held.total} for held in cost.held],
        "sent_bytes": dict(cost.sent_bytes),
        "simulated": plan.simulated,
        "why_not": plan.why_not,
        "provenance": dict(plan.provenance),
    }


def exposed(plan: Plan) -> float:
    """The part of a step that is communication which hides behind nothing."""
    return sum(plan.cost.terms[name] for name in EXPOSED) / plan.cost.step_s


def line_of(plan: Plan, program: str, devices_per_host: int) -> str | None:
    """What to type; None where it is not carried."""
    if plan.strategy is None:
        return None
    engine = engine_of(plan.arrangement, devices_per_host)
    return carried.command(program, plan.strategy, engine, devices_per_host)


def engine_of(arrangement: Arrangement, devices_per_host: int) -> carried.EngineName:
    """Who carries it."""
    return carried.engine_of(arrangement, devices_per_host)


def answer_json(answer: PlanReport, program: str) -> dict[str, Any]:
    """Of all that is said."""
    each = answer.cluster.devices_per_host
    return {
        "program": answer.name,
        "cluster": answer.cluster.name,
        "workers": answer.workers,
        "objective": answer.asked.objective,
        "fits": bool(answer.plans),
        "plans": [plan_json(plan, program, each) for plan in answer.plans],
        "left_out": answer.left_out,
        "bottlenecks": [asdict(gain) for gain in answer.gains],
        "curve": curve_json(answer.curve),
        "fit": {"text": answer.fit.text, "fits": answer.fit.fits},
        "rules": [asdict(rule) for rule in answer.rules],
        "beyond": None if answer.beyond is None else plan_json(answer.beyond, program, each),
        "provenance": provenance(answer),
    }


def provenance(answer: PlanReport) -> dict[str, str]:
    """Of all numbers, and of the best plan's own."""
    told = merged(answer.workload.provenance, answer.cluster.provenance, answer.cluster.device.provenance)
    return told | (dict(answer.plans[0].provenance) if answer.plans else {})


def curve_json(curve: Curve) -> dict[str, Any]:
    """From one worker to all."""
    return {"points": [asdict(point) for point in curve.points], "knee": curve.knee}


def shared_json(found: Shared, jobs: list[SharedJob]) -> dict[str, Any]:
    """Of several models."""
    ways = {"best": found.best, "turns": found.turns, "split": found.split}
    return {
        "programs": [job.name for job in jobs],
        "fits": found.best is not None,
        **{name: None if way is None else _division(way, jobs) for name, way in ways.items()},
    }


def _division(way: WorkerDivision, jobs: list[SharedJob]) -> dict[str, Any]:
    shares = [
        {
            "workers": share.workers,
            "seconds": share.seconds,
            "programs": [
                {"program": jobs[job].name, "strategy": str(plan.strategy), "step_s": plan.cost.step_s}
                for job, plan in zip(share.jobs, share.plans, strict=True)
            ],
        }
        for share in way.shares
    ]
    return {"way": str(way), "seconds": way.seconds, "shares": shares}
