"""Paceline trains PyTorch models in parallel, any way they can be split, at any pace.

    A_t = F( A_{t-1}, Δ(A_{t-1}, D) )

The public names load on first use, so ``import paceline`` is quick and imports no torch.

>>> import paceline
>>> paceline.SmoothSwitch(every=500) == paceline.Strategy.parse("aggregation=smooth-switch:every=500").aggregation
True
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import callbacks
    from paceline.aggregation.asynchronous import Asynchronous
    from paceline.aggregation.base import Aggregation, Apply, Arrival, Cancel, Decision, Discard, Portion, Release
    from paceline.aggregation.buffered import Buffered
    from paceline.aggregation.deadline import Deadline
    from paceline.aggregation.decoupled import Decoupled
    from paceline.aggregation.delay_compensated import DelayCompensated
    from paceline.aggregation.elastic_averaging import ElasticAveraging
    from paceline.aggregation.hogwild import Hogwild
    from paceline.aggregation.local_steps import LocalSteps
    from paceline.aggregation.robust import Robust
    from paceline.aggregation.sandblaster import Sandblaster
    from paceline.aggregation.smooth_switch import SmoothSwitch
    from paceline.aggregation.stale_synchronous import StaleSynchronous
    from paceline.aggregation.synchronous import Synchronous
    from paceline.api.compare import Comparison, compare
    from paceline.api.join import join
    from paceline.api.plan import Plans, plan
    from paceline.api.predictor import predict, predictor
    from paceline.api.resume import resume
    from paceline.api.serve import serve
    from paceline.api.share_workers import SharedRuns, share_workers
    from paceline.api.show import show_mesh, show_shards, show_stages
    from paceline.api.train import launch, train
    from paceline.core.errors import (
        CallbackError,
        CollectiveError,
        InputError,
        NonFiniteError,
        PacelineError,
        WaitTimeoutError,
        WorkerError,
    )
    from paceline.core.registry import register
    from paceline.engine.distributed.sync_batchnorm import synchronised_batchnorm
    from paceline.engine.worker import Worker
    from paceline.optim import LBFGS, Lamb, Lars, scaled_learning_rate, warmup
    from paceline.parameter_scheduling.base import ScheduledProgram
    from paceline.parameter_scheduling.lasso import Lasso
    from paceline.parameter_scheduling.matrix_factorization import MatrixFactorization
    from paceline.parameter_scheduling.run import ScheduledRun, schedule_parameters
    from paceline.parameter_scheduling.schedulers import Scheduler
    from paceline.planner.policies import Pace, pace
    from paceline.program import Program
    from paceline.reduction.base import Reducer, Reduction
    from paceline.replica.capture.capture import cut
    from paceline.run import Run, load
    from paceline.strategy import Strategy

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (LBFGS is no constant)
    "Aggregation",
    "Apply",
    "Arrival",
    "Asynchronous",
    "Buffered",
    "CallbackError",
    "Cancel",
    "CollectiveError",
    "Comparison",
    "Deadline",
    "Decision",
    "Decoupled",
    "DelayCompensated",
    "Discard",
    "ElasticAveraging",
    "Hogwild",
    "InputError",
    "LBFGS",
    "Lamb",
    "Lars",
    "Lasso",
    "LocalSteps",
    "MatrixFactorization",
    "NonFiniteError",
    "Pace",
    "PacelineError",
    "Plans",
    "Portion",
    "Program",
    "Reducer",
    "Reduction",
    "Release",
    "Robust",
    "Run",
    "Sandblaster",
    "ScheduledProgram",
    "ScheduledRun",
    "Scheduler",
    "SharedRuns",
    "SmoothSwitch",
    "StaleSynchronous",
    "Strategy",
    "Synchronous",
    "WaitTimeoutError",
    "Worker",
    "WorkerError",
    "__version__",
    "callbacks",
    "compare",
    "cut",
    "join",
    "launch",
    "load",
    "pace",
    "plan",
    "predict",
    "predictor",
    "register",
    "resume",
    "scaled_learning_rate",
    "schedule_parameters",
    "serve",
    "share_workers",
    "show_mesh",
    "show_shards",
    "show_stages",
    "synchronised_batchnorm",
    "train",
    "warmup",
]

# Module -> the public names in it.
_NAMES = {
    "aggregation": "Aggregation Asynchronous Buffered Deadline Decoupled DelayCompensated ElasticAveraging Hogwild "
    "LocalSteps Robust Sandblaster SmoothSwitch StaleSynchronous Synchronous",
    "aggregation.base": "Apply Arrival Cancel Decision Discard Portion Release",
    "api.compare": "Comparison compare",
    "api.plan": "Plans plan",
    "api.predictor": "predict predictor",
    "api.resume": "resume",
    "api.serve": "serve",
    "api.share_workers": "SharedRuns share_workers",
    "api.show": "show_mesh show_shards show_stages",
    "api.join": "join",
    "api.train": "launch train",
    "core.errors": "CallbackError CollectiveError InputError NonFiniteError PacelineError WaitTimeoutError WorkerError",
    "core.registry": "register",
    "engine.distributed.sync_batchnorm": "synchronised_batchnorm",
    "engine.worker": "Worker",
    "optim": "LBFGS Lamb Lars scaled_learning_rate warmup",
    "parameter_scheduling": "Lasso MatrixFactorization ScheduledProgram ScheduledRun Scheduler schedule_parameters",
    "planner.policies": "Pace pace",
    "program": "Program",
    "reduction": "Reducer Reduction",
    "replica.capture.capture": "cut",
    "run": "Run load",
    "strategy": "Strategy",
}
# Public modules: ``paceline.callbacks.EarlyStopping``.
_MODULES = ("callbacks",)
_HOME = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}


class _Package(ModuleType):
    """Keep public functions where a submodule has their name: ``paceline.plan``, and the command of that package.

    Importing a submodule sets it on its package, after which ``paceline.plan`` would be no function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module: Any = import_module(_HOME.get(name, f"{__name__}.{name}"))
    value = globals()[name] = module if name in _MODULES else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return __all__
