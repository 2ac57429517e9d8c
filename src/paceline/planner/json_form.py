"""Plans as JSON: numbers in seconds, bytes and samples."""

from dataclasses import asdict
from typing import Any

from paceline.planner.answer import PlanReport
from paceline.planner.base import Plan, merged
from paceline.planner.multi_job import SharedJob, SharingResult, WorkerDivision
from paceline.planner.search import supported

EXPOSED = ("shards", "stages", "replicas")
"""Terms of a step that are communication."""


def plan_json(plan: Plan, program: str, devices_per_host: int) -> dict[str, Any]:
    """Return the JSON of one plan."""
    cost, step_s = plan.cost, plan.cost.step_s
    return {
        "strategy": None if plan.strategy is None else str(plan.strategy),
        "command": command_of(plan, program, devices_per_host),
        "arrangement": asdict(plan.arrangement) | {"workers": plan.arrangement.workers},
        "step_s": step_s,
        "low_s": plan.low_s,
        "high_s": plan.high_s,
        "samples_per_s": plan.samples_per_s,
        "utilisation": plan.utilisation,
        "bubble": cost.terms["bubble"] / step_s,
        "exposed_communication": exposed(plan),
        "terms_s": dict(cost.terms),
        "peak_bytes": cost.peak.total,
        "memory_bytes": [asdict(memory) | {"total": memory.total} for memory in cost.memory],
        "sent_bytes": dict(cost.sent_bytes),
        "simulated": plan.simulated,
        "why_not": plan.why_not,
        "provenance": dict(plan.provenance),
    }


def exposed(plan: Plan) -> float:
    """Return the share of a step that is communication which does not overlap with compute."""
    return sum(plan.cost.terms[name] for name in EXPOSED) / plan.cost.step_s


def command_of(plan: Plan, program: str, devices_per_host: int) -> str | None:
    """Return the command that runs a plan; None where it is not supported."""
    if plan.strategy is None:
        return None
    engine = supported.engine_of(plan.arrangement, devices_per_host)
    return supported.command(program, plan.strategy, engine, devices_per_host)


def answer_json(answer: PlanReport, program: str) -> dict[str, Any]:
    """Return the JSON of a report."""
    each = answer.cluster.devices_per_host
    return {
        "program": answer.name,
        "cluster": answer.cluster.name,
        "workers": answer.workers,
        "objective": answer.objectives.objective,
        "fits": bool(answer.plans),
        "plans": [plan_json(plan, program, each) for plan in answer.plans],
        "left_out": answer.left_out,
        "bottlenecks": [asdict(gain) for gain in answer.gains],
        "curve": {"points": [asdict(point) for point in answer.curve.points], "knee": answer.curve.knee},
        "fit": {"text": answer.fit.text, "fits": answer.fit.fits},
        "rules": [asdict(rule) for rule in answer.rules],
        "beyond": None if answer.beyond is None else plan_json(answer.beyond, program, each),
        "provenance": provenance(answer),
    }


def provenance(answer: PlanReport) -> dict[str, str]:
    """Return the sources of all numbers, and those of the best plan."""
    sources = merged(answer.workload.provenance, answer.cluster.provenance, answer.cluster.device.provenance)
    return sources | (dict(answer.plans[0].provenance) if answer.plans else {})


def shared_json(result: SharingResult, jobs: list[SharedJob]) -> dict[str, Any]:
    """Return the JSON of several models that share workers."""
    ways = {"best": result.best, "turns": result.turns, "split": result.split}
    return {
        "programs": [job.name for job in jobs],
        "fits": result.best is not None,
        **{name: None if way is None else _division_json(way, jobs) for name, way in ways.items()},
    }


def _division_json(way: WorkerDivision, jobs: list[SharedJob]) -> dict[str, Any]:
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
