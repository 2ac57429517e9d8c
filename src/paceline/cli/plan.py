"""``paceline plan``: the best strategies, their predicted speed and memory, and why they are the best.

The planner is imported by the functions that need it, so that other commands start fast.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Exit, Option

from paceline.cli.console import FAILED, print_json, session
from paceline.cli.options import Json
from paceline.core.errors import InputError
from paceline.core.formatting import bytes_text, seconds_text

if TYPE_CHECKING:
    from paceline.api.plan import Plans
    from paceline.planner.answer import PlanReport
    from paceline.planner.multi_job import SharedJob, SharingResult
    from paceline.planner.served_plans import Servers

_where, _purpose = (functools.partial(Option, rich_help_panel=panel) for panel in ("Where", "What for"))

# Characters that the tables need.
LEAST_WIDTH = 112

# Rows of the table of memory: of a longer pipeline the first stage, the last, and the one with most memory.
STAGES_SHOWN = 8

_TITLES = ("", "step", "from", "to", "samples/s", "of peak", "memory", "bubble", "exposed", "sent a step")


def plan(
    programs: Annotated[
        list[str],
        Argument(
            metavar="PROGRAM...",
            help="A program as for train, or a shape's TOML file; several share the workers.",
            show_default=False,
        ),
    ],
    *,
    workers: Annotated[int | None, _where(help="Upper bound.", show_default="all cores, or all of the cluster")] = None,
    cluster: Annotated[
        str | None, _where(help='A TOML file, or a name: "4x8 H100-80GB".', show_default="this host, measured")
    ] = None,
    engine: Annotated[
        str | None, _where(help="ray: servers of A on the cluster's hosts, any policy.", show_default="any")
    ] = None,
    unbuilt: Annotated[
        bool, _where("--unbuilt", help="Also propose strategies that such devices don't support yet.")
    ] = False,
    objective: Annotated[str, _purpose(help="throughput, goodput, memory or time-to-loss.")] = "throughput",
    noise_scale: Annotated[
        float | None, _purpose(help="Samples: a run's summary has it; for goodput and time-to-loss.")
    ] = None,
    delay: Annotated[
        str | None, _purpose(help='Delays of some replicas: "fraction=0.5 normal:mean=0,std=0.25"')
    ] = None,
    steps: Annotated[
        list[int] | None, _purpose(help="With several programs: number of steps of each; once for each.")
    ] = None,
    verify: Annotated[int, Option(help="Number of plans to run shortly, predicted next to measured.")] = 0,
    profile: Annotated[Path | None, Option(help="File that keeps the measurements of a program.")] = None,
    calibrate: Annotated[
        Path | None, Option(metavar="FILE.csv", help="Measured runs by which a shape's predictions are corrected.")
    ] = None,
    data: Annotated[Path | None, Option(help="Folder of the data set's standard files.")] = None,
    progress: Annotated[
        bool | None, Option("--progress/--no-progress", help="Show progress on stderr.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Say which strategy trains PROGRAM best, how fast, how much memory it takes, and why."""
    with session(json_output=json):
        from paceline.api.plan import plan

        if len(programs) > 1 and verify:
            raise InputError(f"verify={verify}: several programs are not run together; plan one, or leave --verify out")
        if len(programs) > 1 and calibrate is not None:
            raise InputError(
                f"calibrate={str(calibrate)!r}: plans of several programs are not calibrated; plan one of them"
            )
        if steps and len(programs) == 1:
            raise InputError(f"--steps {steps[0]} is for several programs, which share the workers; leave it out")
        if steps and len(steps) != len(programs):
            raise InputError(
                f"--steps {' --steps '.join(map(str, steps))} for {len(programs)} programs; write it once for each of "
                "them, or leave it out"
            )
        if steps and min(steps) < 1:
            raise InputError(f"--steps {min(steps)} trains nothing; write --steps 1000, say")
        if len(programs) > 1 and engine is not None:
            raise InputError(f"engine={engine!r}: programs that share hosts have no servers; plan one, or leave it out")
        request: dict[str, Any] = {"workers": workers, "cluster": cluster, "engine": engine, "objective": objective}
        request |= {"noise_scale": noise_scale, "delay": delay, "unbuilt": unbuilt}
        request |= {"verify": verify, "profile": profile, "calibrate": calibrate, "data": data, "progress": progress}
        plans = [plan(program, **request) for program in programs]
        single = len(plans) == 1
        values, fits = _one(plans[0], programs[0], json=json) if single else _several(plans, steps, json=json)
    if json:
        print_json(values)
    if not fits:
        raise Exit(FAILED)


def _one(plans: "Plans", program: str, *, json: bool) -> tuple[dict[str, Any], bool]:
    """Print the report of one program unless it is for JSON; return it as JSON, and whether anything fits."""
    from paceline.planner.answer import answer
    from paceline.planner.base import OverlapModel

    measured = plans.profile is not None and plans.objectives.engine == "local"
    overlap_model = plans.overlap_model
    if overlap_model is None and measured and plans.plans:
        overlap_model = OverlapModel(context_bytes=plans.plans[0].cost.peak.context)
    search = plans.workload, plans.cluster, plans.objectives, overlap_model, plans.cost_cache
    report = answer(plans.name, plans.plans, *search, measured=measured)
    program = "PROGRAM" if program.endswith(".toml") else program  # a shape has no code to run
    if not json:
        print_answer(report, program, plans.verified)
    verified = [
        {"strategy": str(each.plan.strategy), "step_s": each.step_s, "ratio": each.ratio} for each in plans.verified
    ]
    return report.json(program) | {"verified": verified}, bool(report.plans)


def _several(plans: "list[Plans]", steps: list[int] | None, *, json: bool) -> tuple[dict[str, Any], bool]:
    """Print how several programs share the workers unless it is for JSON; return it as JSON, and whether they fit."""
    from paceline.planner.multi_job import SharedJob, shared

    counts = steps or [1] * len(plans)
    jobs = [SharedJob(each.name, each.workload, count) for each, count in zip(plans, counts, strict=True)]
    result = shared(jobs, plans[0].cluster, plans[0].objectives, plans[0].overlap_model)
    if not json:
        print_shared(result, jobs)
    return result.json(jobs), result.best is not None


def print_answer(report: "PlanReport", program: str, verified: Iterable[object] = ()) -> None:
    """Print the tables of a report, then their meaning, then the line to run."""
    from paceline.planner.answer import command_of, exposed

    console, cluster = _console(), report.cluster
    name = cluster.name or cluster.device.name or "this host"
    title = f"{report.name} on {name}, up to {report.workers:,} workers, objective {report.objectives.objective}"
    _print(console, title, "bold")
    if not report.plans:
        _print(console, f"nothing fits: {report.fit.text}", "red")
        return
    table, lines = Table(box=None, pad_edge=False), list[str]()
    for title in _TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for number, plan in enumerate(report.plans, start=1):
        cost = plan.cost
        table.add_row(
            str(number),
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
        lines += [f"{number}  {plan.strategy}", *([f"   {plan.why_not}"] if plan.why_not else [])]
    if report.left_out:
        lines.append(f"{report.left_out} more of the same kinds are no better, as far as can be told")
    console.print(table)
    _print(console, "\n".join(lines))
    console.print(_memory(report))
    if report.plans[0].servers:
        console.print(_placement(report.plans[0].servers))

    best, curve = report.plans[0], report.curve
    lines = [f"first bottleneck   {report.gains[0]}"] if report.gains else []
    if report.gains and report.gains[0].seconds <= 0:  # all but launches takes no time
        lines = ["first bottleneck   launches of kernels, which more of no resource shortens"]
    lines += [f"then               {gain}" for gain in report.gains[1:3] if gain.seconds > 0]
    lines.append("workers            " + ", ".join(f"{p.workers:,}: {p.samples_per_s:,.4g}" for p in curve.points))
    knee = "none: twice as many gave at least half as much again" if curve.knee is None else f"{curve.knee:,} workers"
    lines += [f"knee (samples/s)   {knee}", f"memory             {report.fit.text}"]
    lines += [f"rule of thumb      {rule}" for rule in report.rules]
    lines += [f"where from         {name}: {source}" for name, source in report.provenance.items()]
    simulated = best.simulated and best.arrangement.stages > 1
    method = "simulated event by event; " if simulated else "by closed forms; "
    # The provenance of a measured plan has the method already.
    method = "" if "compute" in best.provenance else method
    lines.append(f"                   step: {method}nine of ten are to lie between from and to")
    lines += map(str, verified)
    if beyond := report.beyond:
        speed = f"{seconds_text(beyond.cost.step_s)} a step, {beyond.samples_per_s:,.4g} samples/s"
        lines.append(
            f"what is not supported on {cluster.device.kind} yet would be better: {speed} (--unbuilt proposes such)"
        )
    _print(console, "\n".join(lines))
    command = command_of(best, program, cluster.devices_per_host)
    _print(console, f"run:   {command or f'not supported on {cluster.device.kind} yet'}", "bold")


def _memory(report: "PlanReport") -> Table:
    """Return the table of the memory of a worker of each stage, under the best plan."""
    from paceline.planner.base import WorkerMemory

    table, memory = Table(box=None, pad_edge=False), report.plans[0].cost.memory
    table.add_column("worker of", no_wrap=True)
    parts = [part.name for part in fields(WorkerMemory)]
    for title in (*parts, "all"):
        table.add_column(title, justify="right", no_wrap=True)
    stages = list(range(len(memory)))
    if len(stages) > STAGES_SHOWN:
        stages = sorted({0, max(stages, key=lambda stage: memory[stage].total), len(stages) - 1})
    for stage in stages:
        cells = [bytes_text(getattr(memory[stage], part)) for part in parts]
        table.add_row(f"stage {stage}", *cells, bytes_text(memory[stage].total))
    return table


def _placement(servers: "Servers") -> Table:
    """Return the table of who is on which host."""
    table = Table(box=None, pad_edge=False)
    for title in ("host", "servers", "replicas", "A and the optimizer's state"):
        table.add_column(title, justify="right" if title[0] == "A" else "left", no_wrap=True)
    for host, share in enumerate(servers.hosts):
        who = (", ".join(map(str, each)) or "-" for each in (share.servers, share.replicas))
        table.add_row(f"host {host}", *who, bytes_text(len(share.servers) * servers.state_bytes))
    return table


def print_shared(result: "SharingResult", jobs: "Sequence[SharedJob]") -> None:
    """Print which job gets which workers."""
    console = _console()
    if result.best is None:
        _print(console, "nothing fits: one of the models does not fit all workers", "red")
        return
    for title, division in (("best", result.best), ("in turns", result.turns), ("each its own", result.split)):
        if division is not None and (title == "best" or division != result.best):
            _print(console, f"{title}: {division}, all done after {seconds_text(division.seconds)}", "bold")
            for share in division.shares:
                for job, plan in zip(share.jobs, share.plans, strict=True):
                    step = seconds_text(plan.cost.step_s)
                    line = f"  {share.workers:,} workers  {jobs[job].name}: {plan.strategy}, {step} a step"
                    _print(console, line)


def _console() -> Console:
    """Return a console as wide as the tables, even if the terminal is narrower or there is none."""
    console = Console()
    return console if console.width >= LEAST_WIDTH else Console(width=LEAST_WIDTH)


def _print(console: Console, text: str, style: str = "") -> None:
    # As Text: rich would read square brackets in a strategy as markup.
    if text:
        console.print(Text(text, style=style), soft_wrap=True)
