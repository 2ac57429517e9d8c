"""Updates of a few blocks of parameters at a time, chosen by importance and dependency (STRADS)."""

from paceline.parameter_scheduling.base import ScheduledProgram
from paceline.parameter_scheduling.lasso import Lasso
from paceline.parameter_scheduling.matrix_factorization import MatrixFactorization
from paceline.parameter_scheduling.run import Evaluation, ScheduledRun, schedule_parameters
from paceline.parameter_scheduling.schedulers import Cyclic, Priority, Scheduler, Uniform

__all__ = [
    "Cyclic",
    "Evaluation",
    "Lasso",
    "MatrixFactorization",
    "Priority",
    "ScheduledProgram",
    "ScheduledRun",
    "Scheduler",
    "Uniform",
    "schedule_parameters",
]
