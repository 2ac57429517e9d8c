"""plan: the best strategies for a program or a model shape, on this host or a described cluster.

Planning a shape on a described cluster imports no torch: the imports of what measures and runs programs are local.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from paceline.clock.times import Delay
from paceline.core.errors import InputError, check_choice
from paceline.core.formatting import bytes_text, seconds_text
from paceline.metrics.short_forms import html_table
from paceline.planner.answer import alternatives
from paceline.planner.base import OverlapModel, Plan, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.explain import explained
from paceline.planner.search.objective import Objective, Objectives

if TYPE_CHECKING:
    from paceline.api.plan_verification import Verified
    from paceline.planner.program.profile import Profile
    from paceline.planner.search.search import CostCache
    from paceline.program import Program

# Number of plans in Plans.text.
SHOWN = 5


@dataclass(frozen=True, repr=False)
class Plans(Sequence[Plan]):
    """Plans, the best first; at a prompt the best that differ, in a notebook a table of them.

    Args:
        name: name of the program or shape.
        plans: empty if nothing fits.
        workload: the work of one step.
        cluster: devices and links.
        objectives: the objective and the bounds of the search.
        verified: measured runs of the first plans.
        profile: measurements of a program; None: a shape has none.
        overlap_model: assumptions about overlap; None: they are part of the measurements.
        cost_cache: costs that the search has computed, for later searches of the same workload and cluster.
    """

    name: str
    plans: tuple[Plan, ...]
    workload: Workload
    cluster: Cluster
    objectives: Objectives
    verified: "tuple[Verified, ...]" = ()
    profile: "Profile | None" = None
    overlap_model: OverlapModel | None = None
    cost_cache: "CostCache | None" = field(default=None, repr=False, compare=False)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Plan]: ...
    def __getitem__(self, index: int | slice) -> Plan | Sequence[Plan]:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    @property
    def best(self) -> Plan:
        """The first plan; raises InputError if nothing fits."""
        if not self.plans:
            raise InputError(f"nothing fits: no way to train {self.name} on {self.cluster.name}; see its text()")
        return self.plans[0]

    def text(self) -> str:
        """Return the best plans that differ, one per line, each with the reason why the best is preferred to it."""
        lines = []
        for plan in self._shown():
            reason = f"; {plan.why_not}" if plan.why_not else ""
            lines.append(f"{plan.strategy}: {plan.figures()}{reason}")
        return "\n".join([*(lines or ["nothing fits"]), *map(str, self.verified)])

    def _shown(self) -> Sequence[Plan]:
        differing = alternatives(self.plans, self.workload, self.objectives, SHOWN)[0]
        return explained(differing, self.objectives)

    def _head(self) -> str:
        place = self.cluster.name or self.cluster.device.name
        return f"{self.name} on {place}, objective {self.objectives.objective}: {len(self.plans)} plans"

    def __repr__(self) -> str:
        return "\n".join([f"<Plans {self._head()}", *(f"  {line}" for line in self.text().splitlines())]) + ">"

    def _repr_html_(self) -> str:
        rows = []
        for plan in self._shown():
            step, low, high = map(seconds_text, (plan.cost.step_s, plan.low_s, plan.high_s))
            rate, memory = f"{plan.samples_per_s:,.0f}", bytes_text(plan.cost.peak.total)
            rows.append((str(plan.strategy), step, f"{low} to {high}", rate, memory, plan.why_not))
        return html_table(self._head(), rows, titles=("strategy", "step", "nine of ten", "samples/s", "memory", ""))


def plan(
    program: "Program | str | Path",
    *,
    workers: int | None = None,
    cluster: "Cluster | str | Path | None" = None,
    engine: Literal["ray"] | None = None,
    objective: Objective = "throughput",
    noise_scale: float | None = None,
    delay: Delay | str | None = None,
    unbuilt: bool = False,
    verify: int = 0,
    profile: str | Path | None = None,
    calibrate: str | Path | None = None,
    data: Path | None = None,
    progress: bool | None = None,
) -> Plans:
    """Return the best strategies with the predicted time of a step and memory of each worker.

    A program is measured first, on this host, for a minute at most. For this host the best plans are then re-estimated
    from measured components of their own steps.

    Args:
        program: a Program, the name of one as on the command line, or the path of a shape's TOML file.
        workers: upper bound; None: all cores of this host, or all devices of the cluster.
        cluster: a value, or the path or name of a cluster; None: this host.
        engine: ``ray``: plans with servers of A on the hosts of a Ray cluster, under any policy; it needs ``cluster``,
            of CPUs. None: any engine; on several hosts servers are planned where there is a ``delay``.
        objective: ``throughput``, ``goodput``, ``memory`` or ``time-to-loss``.
        noise_scale: X in samples, required by ``goodput`` and ``time-to-loss``.
        delay: delays of some replicas, in seconds per gradient, as for :func:`~paceline.train`; then policies compete.
        unbuilt: also propose strategies that are not supported on such devices yet.
        verify: number of the best plans that are run for some seconds, in turns, the first also with ``compile=true``;
            on this host only.
        profile: file that keeps the measurements; if it exists and fits, nothing is measured.
        calibrate: CSV file of measured runs, by which the predictions of a shape are corrected.
        data: folder of a built-in program's files.
        progress: show progress; None: if stderr is a terminal.

    Returns:
        The plans, best first; step times in seconds, memory in bytes.

    Raises:
        InputError: something can't be done as written.

    >>> from tempfile import TemporaryDirectory
    >>> shape = "[model]\\nlayers = 12\\nhidden = 768\\nheads = 12\\n[train]\\nglobal_batch = 64"
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "small.toml"
    ...     _ = path.write_text(shape)
    ...     print(plan(path, cluster="1x4 A100-80GB").best.arrangement.workers)
    4
    """
    delay = Delay.parse(delay) if isinstance(delay, str) else delay
    objectives = Objectives(objective, noise_scale, workers=workers, engine=engine, delay=delay, unbuilt=unbuilt)
    if noise_scale is not None and not objectives.statistical:
        raise InputError(
            f"noise_scale={noise_scale}: objective={objective} does not count how much a sample of a larger batch is "
            "worth; leave noise_scale out, or write objective=goodput"
        )
    if engine is not None:
        _refuse_engine(engine, cluster)
    shape = Path(program) if isinstance(program, (str, Path)) and str(program).endswith(".toml") else None
    if cluster is not None and not isinstance(cluster, Cluster):
        from paceline.planner import cluster_file
        from paceline.planner.shapes import shape_file

        # Devices have one rate per precision; a shape names the precision in which it is trained.
        cluster = cluster_file.read(cluster, *([shape_file.read(shape).precision] if shape else []))
    if engine == "ray" and isinstance(cluster, Cluster):
        from paceline.planner import served_plans

        served_plans.refuse(cluster)
    if verify and (shape or cluster):
        reason = "a shape has no code to run" if shape else "plans for another machine can't be run on this one"
        raise InputError(f"verify={verify}: {reason}; leave verify out")
    if shape and profile is not None:
        raise InputError(
            f"profile={str(profile)!r}: a shape has no code to measure, so there is nothing to keep; leave profile out"
        )
    if shape:
        return _plan_shape(shape, cluster, objectives, calibrate)
    if calibrate is not None:
        raise InputError(
            f"calibrate={str(calibrate)!r}: a program is measured on this host, so its plans are not calibrated; leave "
            "calibrate out, or plan a shape's TOML file"
        )
    # From here on torch is imported.
    from paceline.datasets import load_program
    from paceline.program import Program

    if isinstance(program, (str, Path)):
        program = load_program(str(program), data=data)
    if not isinstance(program, Program):
        raise InputError(f"program is {type(program).__name__}, no Program and no name; write plan('digits')")
    plans = _plan_program(program, cluster, objectives, profile, progress)
    if not verify:
        return plans
    from paceline.api import plan_verification
    from paceline.api.train import train

    # Of the plans that this host supports, the first ones run in turns.
    chosen = [each for each in plans if each.strategy is not None and not each.why_not][:verify]
    return replace(plans, verified=tuple(plan_verification.verify(train, chosen, program, progress=progress)))


def _refuse_engine(engine: str, cluster: object) -> None:
    """Raise InputError for an engine that is not asked for, and for servers on hosts that are not described."""
    check_choice("engine to plan for", engine, ("ray",))
    if cluster is None:
        raise InputError(
            f"engine='{engine}' plans servers for the links between hosts, of which this host has none; write "
            "cluster='hosts.toml', or leave engine out"
        )


def _plan_shape(path: Path, cluster: Cluster | None, objectives: Objectives, calibrate: str | Path | None) -> Plans:
    from paceline.planner.cluster_file import assumed
    from paceline.planner.shapes import shape_file

    if cluster is None:
        raise InputError(
            f"{path} is a shape, without code that could be measured here; write cluster='4x8 H100-80GB', or a file's "
            "path"
        )
    cluster, overlap_model = assumed(cluster)
    workload = shape_file.read(path).workload(cluster.device)
    plans = Plans(workload.name, (), workload, cluster, objectives, overlap_model=overlap_model)
    if calibrate is None:
        return _searched(plans)
    from paceline.planner.calibration.calibrated_plans import PlanCalibration

    calibration = PlanCalibration.read(Path(calibrate), workload, cluster)
    calibrated = replace(
        plans, workload=calibration.workload, cluster=calibration.cluster, overlap_model=calibration.overlap_model
    )
    return _searched(calibrated, calibration.plan)


def _plan_program(
    program: "Program", cluster: Cluster | None, objectives: Objectives, path: str | Path | None, progress: bool | None
) -> Plans:
    """Return plans for a program, after measuring it: for a described cluster, or for this host."""
    from paceline.planner.cluster_file import assumed
    from paceline.planner.program.closed_form import cores
    from paceline.planner.program.measured_workload import elsewhere
    from paceline.planner.program.plans import plans_here
    from paceline.progress import measuring

    name, most = program.name, None if cluster else objectives.workers
    line = f"{name}: planning measures its operators and short runs on this host, for a minute at most"
    with measuring(progress, f"{name}: planning", line=line) as report:
        profile = _profile(program, most or cores(), path, report)
        if cluster is None:
            result = plans_here(program, objectives, profile, report)
            request = result.workload, result.cluster, result.objectives
            return Plans(name, tuple(result.plans), *request, profile=result.profile)
    objectives = replace(objectives, fixed="replica" if program.global_batch_size is None else "global")
    workload = elsewhere(profile, cluster, program.global_batch_size or profile.batch)
    cluster, overlap_model = assumed(cluster)
    return _searched(Plans(name, (), workload, cluster, objectives, profile=profile, overlap_model=overlap_model))


def _searched(plans: Plans, calibrate: Callable[[Plan], Plan] | None = None) -> Plans:
    """Return the same with the plans of a search, each corrected by ``calibrate``."""
    from paceline.planner.search.search import OF_EACH_KIND, CostCache, search

    workload, cluster = plans.workload, plans.cluster
    cache = CostCache(workload, cluster, plans.overlap_model, calibrate)
    best = search(workload, cluster, plans.objectives, cost_cache=cache, of_each_kind=OF_EACH_KIND).plans
    return replace(plans, plans=best, cost_cache=cache)


def _profile(program: "Program", workers: int, path: str | Path | None, report: Any) -> "Profile":
    """Return the profile in a file, if it is of this program; or measure one, and keep it there."""
    from paceline.planner.program.profile import load, save
    from paceline.planner.program.profiling import elements
    from paceline.planner.program.profiling import profile as measure

    if path is None or not Path(path).exists():
        profile = measure(program, workers, report)
        if path is not None:
            save(profile, path)
        return profile
    profile, parameters = load(path), elements(program)
    if (profile.program, profile.parameters) != (program.name, parameters):
        raise InputError(
            f"{path} is the profile of {profile.program} with {profile.parameters:,} parameters, not of {program.name} "
            f"with {parameters:,}; write another file"
        )
    # How much slower all workers are while others are busy was measured up to this number of them.
    most = profile.busy[-1].workers
    if most < workers:
        raise InputError(f"{path} was measured with {most} workers, not {workers}; write another file")
    return profile
