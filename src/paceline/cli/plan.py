"""``paceline plan``: which strategy, how fast, how much memory, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from paceline.cli.console import FAILED, print_json, session
from paceline.cli.options import Json
from paceline.core.errors import InputError

if TYPE_CHECKING:
    from paceline.api.plan import Plans

_HERE, _ASKED = "Where", "What for"


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
    workers: Annotated[
        int | None,
        Option(help="At the most.", show_default="all cores, or all of the cluster", rich_help_panel=_HERE),
    ] = None,
    cluster: Annotated[
        str | None,
        Option(
            help='A TOML file, or a name: "4x8 H100-80GB".', show_default="this host, measured", rich_help_panel=_HERE
        ),
    ] = None,
    unbuilt: Annotated[
        bool, Option("--unbuilt", help="Propose what such devices don't carry yet as well.", rich_help_panel=_HERE)
    ] = False,
    objective: Annotated[
        str, Option(help="throughput, goodput, memory or time-to-loss.", rich_help_panel=_ASKED)
    ] = "throughput",
    noise_scale: Annotated[
        float | None,
        Option(help="Samples: a run's summary has it; for goodput and time-to-loss.", rich_help_panel=_ASKED),
    ] = None,
    delay: Annotated[
        str | None,
        Option(help='Replicas that are slow: "fraction=0.5 normal:mean=0,std=0.25"', rich_help_panel=_ASKED),
    ] = None,
    steps: Annotated[
        list[int] | None,
        Option(help="Of several programs: how many steps each trains; once for each.", rich_help_panel=_ASKED),
    ] = None,
    verify: Annotated[int, Option(help="Run so many of the best shortly, predicted beside measured.")] = 0,
    profile: Annotated[Path | None, Option(help="File that keeps what was measured of a program.")] = None,
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

        _refuse(programs, steps, verify, calibrate)
        asked: dict[str, Any] = {"workers": workers, "cluster": cluster, "objective": objective}
        asked |= {"noise_scale": noise_scale, "delay": delay, "unbuilt": unbuilt}
        asked |= {"verify": verify, "profile": profile, "calibrate": calibrate, "data": data, "progress": progress}
        found = [plan(program, **asked) for program in programs]
        fits = _one(found[0], programs[0], json=json) if len(found) == 1 else _several(found, steps, json=json)
    told, ok = fits
    if json:
        print_json(told)
    if not ok:
        raise typer.Exit(FAILED)


def _refuse(programs: list[str], steps: list[int] | None, verify: int, calibrate: Path | None) -> None:
    if len(programs) > 1 and verify:
        raise InputError(f"verify={verify}: several programs are not run together; plan one, or leave --verify out")
    if len(programs) > 1 and calibrate is not None:
        raise InputError(
            f"calibrate={str(calibrate)!r}: plans of several programs are not calibrated; plan one of them"
        )
    if steps and (len(steps) != len(programs) or len(programs) == 1):
        raise InputError(
            f"--steps {' --steps '.join(map(str, steps))} for {len(programs)} programs; write it once for each of "
            "several, or leave it out"
        )
    if steps and min(steps) < 1:
        raise InputError(f"--steps {min(steps)} trains nothing; write --steps 1000, say")


def _one(plans: "Plans", program: str, *, json: bool) -> tuple[dict[str, Any], bool]:
    """Of a program by itself; printed here where it is not for JSON."""
    from paceline.cli.plan_tables import print_answer
    from paceline.planner.answer import answer
    from paceline.planner.base import OverlapModel
    from paceline.planner.json_form import answer_json

    here = plans.profile is not None and plans.asked.engine == "local"
    held = OverlapModel(context_bytes=plans.plans[0].cost.peak.context) if here and plans.plans else None
    overlap_model = plans.habits or held
    of = plans.workload, plans.cluster, plans.asked, overlap_model, plans.known
    said = answer(plans.name, plans.plans, *of, measured=here)
    program = "PROGRAM" if program.endswith(".toml") else program  # a shape has no code to run
    if not json:
        print_answer(said, program, plans.verified)
    verified = [
        {"strategy": str(each.plan.strategy), "step_s": each.step_s, "ratio": each.ratio} for each in plans.verified
    ]
    return answer_json(said, program) | {"verified": verified}, bool(said.plans)


def _several(found: "list[Plans]", steps: list[int] | None, *, json: bool) -> tuple[dict[str, Any], bool]:
    from paceline.cli.plan_tables import print_shared
    from paceline.planner.json_form import shared_json
    from paceline.planner.multi_job import SharedJob, shared

    many = steps or [1] * len(found)
    jobs = [SharedJob(each.name, each.workload, count) for each, count in zip(found, many, strict=True)]
    best = shared(jobs, found[0].cluster, found[0].asked, found[0].habits)
    if not json:
        print_shared(best, jobs)
    return shared_json(best, jobs), best.best is not None
