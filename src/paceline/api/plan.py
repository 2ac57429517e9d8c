"""plan: which strategy for a program or a shape, on this host or a described cluster; held to short runs if asked for.

Planning a shape on a described cluster imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from paceline.clock.times import Delay
from paceline.core.errors import InputError
from paceline.planner.answer import alternatives
from paceline.planner.base import OverlapModel, Plan, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.explain import explained
from paceline.planner.search.objective import Objective, Objectives

if TYPE_CHECKING:
    from paceline.api.plan_verification import Verified
    from paceline.planner.program.profile import Profile
    from paceline.planner.search.cost_cache import CostCache
    from paceline.program import Program

SHOWN = 5
"""Plans of a text."""


@dataclass(frozen=True)
class Plans(Sequence[Plan]):
    """Plans, the best first.

    Args:
        name: what is planned.
        plans: empty where nothing fits.
        workload: what they were made for.
        cluster: and on what.
        asked: the objective and what was to be kept to.
        verified: the first of them as they were run.
        profile: what was measured of a program; None: of a shape there is none.
        habits: that were assumed; None: what was measured has them.
        known: what the search has found out of the workload on the cluster, for others to go on with.
    """

    name: str
    plans: tuple[Plan, ...]
    workload: Workload
    cluster: Cluster
    asked: Objectives
    verified: "tuple[Verified, ...]" = ()
    profile: "Profile | None" = None
    habits: OverlapModel | None = None
    known: "CostCache | None" = field(default=None, repr=False, compare=False)

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
        """The first; raises InputError where nothing fits."""
        if not self.plans:
            raise InputError(f"nothing fits: no way to train {self.name} on {self.cluster.name}; see its text()")
        return self.plans[0]

    def text(self) -> str:
        """The best that differ, one a line, each but the first with why that is preferred; below them what was run."""
        shown = alternatives(self.plans, self.workload, self.asked, SHOWN).plans
        lines = [_line(plan) for plan in explained(shown, self.asked)] or ["nothing fits"]
        return "\n".join([*lines, *map(str, self.verified)])


def plan(
    program: "Program | str | Path",
    *,
    workers: int | None = None,
    cluster: "Cluster | str | Path | None" = None,
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
    """The best strategies, best first, with what a step takes and workers hold.

    A program is measured first, on this host: at most a minute. On this host the best plans are then foretold once more
    from their pieces, each measured by itself.

    Args:
        program: a Program, the name of one as on the command line, or the path of a shape's TOML file.
        workers: at the most; None: all cores of this host, or all of the cluster.
        cluster: a value, or a file or a name of one; None: this host.
        objective: ``throughput``, ``goodput``, ``memory`` or ``time-to-loss``.
        noise_scale: X in samples, which the second and the last need.
        delay: of some of the replicas, as for :func:`~paceline.train`; then policies compete.
        unbuilt: whether to propose what is not carried on such devices yet.
        verify: how many of the best are then run shortly, in turns, and laid beside what was foretold; on this host.
        profile: a file to keep what was measured in; where there is one of this machine, nothing is measured.
        calibrate: a CSV file of measured runs, by which the predictions of a shape are corrected.
        data: folder of a built-in program's files.
        progress: whether to draw how far it is; None: where stderr is a terminal.

    Raises:
        InputError: what can't be done as written.

    >>> from tempfile import TemporaryDirectory
    >>> shape = "[model]\\nlayers = 12\\nhidden = 768\\nheads = 12\\n[train]\\nglobal_batch = 64"
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "small.toml"
    ...     _ = path.write_text(shape)
    ...     print(plan(path, cluster="1x4 A100-80GB").best.arrangement.workers)
    4
    """
    late = Delay.parse(delay) if isinstance(delay, str) else delay
    asked = Objectives(objective, noise_scale, workers=workers, delay=late, unbuilt=unbuilt)
    where = _cluster(cluster, program)
    if _is_shape(program):
        _refuse_verify(verify, "a shape has no code to run")
        return _of_shape(Path(str(program)), where, asked, calibrate)
    if calibrate is not None:
        raise InputError(
            f"calibrate={str(calibrate)!r}: a program is measured on this host, so its plans are not calibrated; leave "
            "calibrate out, or plan a shape's TOML file"
        )
    made = _program(program, data)
    if where is not None:
        _refuse_verify(verify, "plans for another machine can't be run on this one")
        return _elsewhere(made, where, asked, profile, progress)
    return _here(made, asked, verify, profile, progress)


def _line(plan: Plan) -> str:
    took = f"{plan.cost.step_s * 1e3:.3g} ms ({plan.low_s * 1e3:.3g} to {plan.high_s * 1e3:.3g})"
    held = f"{plan.cost.peak.total / 2**20:,.0f} MiB"
    why = f"; {plan.why_not}" if plan.why_not else ""
    return f"{plan.strategy}: {took}, {plan.samples_per_s:,.0f} samples/s, {held} at the most{why}"


def _is_shape(program: Any) -> bool:
    return isinstance(program, (str, Path)) and str(program).endswith(".toml")


def _cluster(cluster: Cluster | str | Path | None, program: "Program | str | Path") -> Cluster | None:
    """Its devices at the precision that a shape is trained in."""
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    from paceline.planner import cluster_file
    from paceline.planner.shapes import shape_file

    if _is_shape(program):
        return cluster_file.read(cluster, shape_file.read(Path(str(program))).precision)
    return cluster_file.read(cluster)


def _program(program: "Program | str | Path", data: Path | None) -> "Program":
    from paceline.datasets import load_program
    from paceline.program import Program

    if isinstance(program, (str, Path)):
        return load_program(str(program), data=data)
    if not isinstance(program, Program):
        raise InputError(f"program is {type(program).__name__}, no Program and no name; write plan('digits')")
    return program


def _of_shape(path: Path, cluster: Cluster | None, asked: Objectives, calibrate: str | Path | None) -> Plans:
    from paceline.planner.cluster_file import assumed
    from paceline.planner.search.cost_cache import CostCache
    from paceline.planner.search.search import OF_EACH_KIND, search
    from paceline.planner.shapes import shape_file

    if cluster is None:
        raise InputError(
            f"{path} is a shape, without code that could be measured here; write cluster='4x8 H100-80GB', or a file's "
            "path"
        )
    cluster, habits = assumed(cluster)
    workload, calibration = shape_file.read(path).workload(cluster.device), None
    if calibrate is not None:
        from paceline.planner.calibration.calibrated_plans import PlanCalibration

        calibration = PlanCalibration.read(Path(calibrate), workload, cluster)
        workload, cluster, habits = calibration.workload, calibration.cluster, calibration.overlap_model
    known = CostCache(workload, cluster, habits, None if calibration is None else calibration.plan)
    plans = search(workload, cluster, asked, cost_cache=known, of_each_kind=OF_EACH_KIND).plans
    return Plans(workload.name, plans, workload, cluster, asked, habits=habits, known=known)


def _here(program: "Program", asked: Objectives, verify: int, path: str | Path | None, progress: bool | None) -> Plans:
    from paceline.planner.program.closed_form import cores
    from paceline.planner.program.plans import plans_here
    from paceline.progress import measuring

    with measuring(progress, f"{program.name}: planning") as tell:
        known = _profile(program, asked.workers or cores(), path, tell)
        found = plans_here(program, asked, known, tell)
    plans = Plans(program.name, tuple(found.plans), found.workload, found.cluster, found.asked, profile=found.profile)
    return verified(plans, program, verify, progress) if verify else plans


def _elsewhere(
    program: "Program", cluster: Cluster, asked: Objectives, path: str | Path | None, progress: bool | None
) -> Plans:
    from paceline.planner.cluster_file import assumed
    from paceline.planner.program.closed_form import cores
    from paceline.planner.program.measured_workload import elsewhere
    from paceline.planner.search.cost_cache import CostCache
    from paceline.planner.search.search import OF_EACH_KIND, search
    from paceline.progress import measuring

    with measuring(progress, f"{program.name}: planning") as tell:
        known = _profile(program, cores(), path, tell)
    own = program.global_batch_size is None
    asked = replace(asked, fixed="replica" if own else "global")
    workload = elsewhere(known, cluster, program.global_batch_size or known.batch)
    cluster, habits = assumed(cluster)
    found = CostCache(workload, cluster, habits)
    plans = search(workload, cluster, asked, cost_cache=found, of_each_kind=OF_EACH_KIND).plans
    return Plans(program.name, plans, workload, cluster, asked, profile=known, habits=habits, known=found)


def _profile(program: "Program", workers: int, path: str | Path | None, tell: Any) -> "Profile":
    """From its file, or measured, and then kept there."""
    from paceline.planner.program.profile import load, save
    from paceline.planner.program.profiling import profile

    if path is not None and Path(path).exists():
        return _fitting(load(path), program, workers, path)
    made = profile(program, workers, tell)
    if path is not None:
        save(made, path)
    return made


def _fitting(known: "Profile", program: "Program", workers: int, path: str | Path) -> "Profile":
    """A profile that was kept, if it is this program's."""
    from paceline.planner.program.profiling import elements

    parameters = elements(program)
    if (known.program, known.parameters) != (program.name, parameters):
        raise InputError(
            f"{path} is the profile of {known.program} with {known.parameters:,} parameters, not of {program.name} "
            f"with {parameters:,}; write another file"
        )
    most = known.busy[-1].workers
    if most < workers:
        raise InputError(f"{path} was measured with {most} workers, not {workers}; write another file")
    return known


def verified(plans: Plans, program: "Program", count: int, progress: bool | None = None) -> Plans:
    """The same plans with the first so many run shortly, in turns."""
    from paceline.api.plan_verification import run_in_turns

    chosen = [each for each in plans if each.strategy is not None and not each.why_not][:count]
    return replace(plans, verified=tuple(run_in_turns(chosen, program, progress=progress)))


def _refuse_verify(verify: int, why: str) -> None:
    if verify:
        raise InputError(f"verify={verify}: {why}; leave verify out")
