"""What ``plan`` prints for people."""

from collections.abc import Iterable, Sequence
from dataclasses import fields

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.core.formatting import bytes_text, seconds_text
from paceline.planner.answer import PlanReport
from paceline.planner.base import Plan, WorkerMemory
from paceline.planner.json_form import command_of, exposed, provenance
from paceline.planner.multi_job import SharedJob, SharingResult, WorkerDivision

LEAST_WIDTH = 112
"""Characters that the tables need."""

STAGES_SHOWN = 8
"""Of a pipeline's memory: beyond, the first, the last and the one that holds most."""


def print_answer(answer: PlanReport, program: str, verified: Iterable[object] = ()) -> None:
    """Tables, then what they mean, then the line to run."""
    console = _console()
    _say(console, f"{answer.name} on {_where(answer)}, objective {answer.objectives.objective}", "bold")
    if not answer.plans:
        _say(console, f"nothing fits: {answer.fit.text}", "red")
        return
    console.print(_plans(answer.plans))
    _say(console, "\n".join(_lost(answer)))
    console.print(_memory(answer.plans[0]))
    _say(console, "\n".join(_meaning(answer)))
    for each in verified:
        _say(console, str(each))
    _say(console, "\n".join(_beyond(answer)))
    _say(console, f"run:   {command_of(answer.plans[0], program, answer.cluster.devices_per_host)}", "bold")


def _console() -> Console:
    """As wide as the tables are, where the terminal is narrower or there is none."""
    found = Console()
    return found if found.width >= LEAST_WIDTH else Console(width=LEAST_WIDTH)


def _say(console: Console, text: str, style: str = "") -> None:
    """As Text: square brackets in a strategy are no markup."""
    if text:
        console.print(Text(text, style=style), soft_wrap=True)


def _where(answer: PlanReport) -> str:
    cluster = answer.cluster
    return f"{cluster.name or cluster.device.name or 'this host'}, up to {answer.workers:,} workers"


def _plans(plans: Sequence[Plan]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", "step", "from", "to", "samples/s", "of peak", "memory", "bubble", "exposed", "sent a step"):
        table.add_column(title, justify="right", no_wrap=True)
    for number, plan in enumerate(plans, start=1):
        table.add_row(str(number), *_figures(plan))
    return table


def _figures(plan: Plan) -> tuple[str, ...]:
    cost = plan.cost
    return (
        seconds_text(cost.step_s),
        seconds_text(plan.low_s),
        seconds_text(plan.high_s),
        f"{plan.samples_per_s:,.4g}",
        "" if plan.utilisation is None else f"{plan.utilisation:.1%}",
        bytes_text(cost.peak.total),
        f"{cost.terms['bubble'] / cost.step_s:.1%}",
        f"{exposed(plan):.1%}",
        bytes_text(sum(cost.sent_bytes.values())),
    )


def _lost(answer: PlanReport) -> Iterable[str]:
    for number, plan in enumerate(answer.plans, start=1):
        yield f"{number}  {plan.strategy}"
        if plan.why_not:
            yield f"   {plan.why_not}"
    if answer.left_out:
        yield f"{answer.left_out} more of the same kinds are no better, as far as can be told"


def _memory(plan: Plan) -> Table:
    """Of a worker of each stage."""
    table = Table(box=None, pad_edge=False)
    table.add_column("worker of", no_wrap=True)
    names = [each.name for each in fields(WorkerMemory)]
    for title in (*names, "all"):
        table.add_column(title, justify="right", no_wrap=True)
    for stage in _stages(plan):
        held = plan.cost.memory[stage]
        cells = [bytes_text(getattr(held, name)) for name in names]
        table.add_row(f"stage {stage}", *cells, bytes_text(held.total))
    return table


def _stages(plan: Plan) -> Sequence[int]:
    held = plan.cost.memory
    if len(held) <= STAGES_SHOWN:
        return range(len(held))
    most = max(range(len(held)), key=lambda stage: held[stage].total)
    return sorted({0, most, len(held) - 1})


def _meaning(answer: PlanReport) -> Iterable[str]:
    if answer.gains:
        yield f"first bottleneck   {answer.gains[0]}"
        yield from (f"then               {gain}" for gain in answer.gains[1:3] if gain.seconds > 0)
    curve = answer.curve
    yield "workers            " + ", ".join(f"{each.workers:,}: {each.samples_per_s:,.4g}" for each in curve.points)
    knee = "none: twice as many gave at least half as much again" if curve.knee is None else f"{curve.knee:,} workers"
    yield f"knee (samples/s)   {knee}"
    yield f"memory             {answer.fit.text}"
    yield from (f"rule of thumb      {rule}" for rule in answer.rules)
    yield from (f"where from         {name}: {source}" for name, source in provenance(answer).items())
    yield f"                   step: {_how(answer.plans[0])}nine of ten are to lie between from and to"


def _how(plan: Plan) -> str:
    if "compute" in plan.provenance:  # which says it
        return ""
    return "simulated event by event; " if plan.simulated and plan.arrangement.stages > 1 else "by closed forms; "


def _beyond(answer: PlanReport) -> Iterable[str]:
    if answer.beyond is not None:
        plan, kind = answer.beyond, answer.cluster.device.kind
        took = f"{seconds_text(plan.cost.step_s)} a step, {plan.samples_per_s:,.4g} samples/s"
        yield f"not supported on {kind} yet, and better: {plan.strategy}, {took} (--unbuilt proposes such)"


def print_shared(found: SharingResult, jobs: Sequence[SharedJob]) -> None:
    """Who has which workers."""
    console = _console()
    if found.best is None:
        _say(console, "nothing fits: one of the models does not fit all workers", "red")
        return
    for title, way in (("best", found.best), ("in turns", found.turns), ("each its own", found.split)):
        if way is not None and (title == "best" or way != found.best):
            _say(console, f"{title}: {way}, all done after {seconds_text(way.seconds)}", "bold")
            _say(console, "\n".join(_shares(way, jobs)))


def _shares(way: WorkerDivision, jobs: Sequence[SharedJob]) -> Iterable[str]:
    for share in way.shares:
        for job, plan in zip(share.jobs, share.plans, strict=True):
            step = seconds_text(plan.cost.step_s)
            yield f"  {share.workers:,} workers  {jobs[job].name}: {plan.strategy}, {step} a step"
