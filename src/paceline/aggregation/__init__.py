"""F: which Δs are combined, when, with what weights, and which replicas may go on. No torch.

Every file of this folder is imported, so a policy is added by adding its file.
"""

import importlib
import pkgutil

from paceline.aggregation.adaptive import Adaptive
from paceline.aggregation.asynchronous import Asynchronous
from paceline.aggregation.base import (
    Aggregation,
    Apply,
    Arrival,
    Buffer,
    Cancel,
    Decision,
    Discard,
    Portion,
    Release,
    combined,
    parse,
    released,
)
from paceline.aggregation.buffered import Buffered
from paceline.aggregation.deadline import Deadline
from paceline.aggregation.decoupled import Decoupled
from paceline.aggregation.delay_compensated import DelayCompensated
from paceline.aggregation.elastic_averaging import ElasticAveraging
from paceline.aggregation.hogwild import Hogwild
from paceline.aggregation.local_steps import LocalSteps, Outer
from paceline.aggregation.loss_driven import LossDriven
from paceline.aggregation.plateau import Plateau
from paceline.aggregation.robust import Robust
from paceline.aggregation.sandblaster import Sandblaster
from paceline.aggregation.smooth_switch import SmoothSwitch
from paceline.aggregation.stale_synchronous import StaleSynchronous
from paceline.aggregation.synchronous import Synchronous
from paceline.aggregation.thresholds import Curve, Exponential, Linear, PerLearningRate, Step, Threshold
from paceline.aggregation.throughput import Throughput
from paceline.core.delta import Accumulated, Change, Distance, Gradient, InPlace, Keep, Mix, Rebase, Replace
from paceline.core.registry import register, registered
from paceline.core.text_form import text_of

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = [
    "Accumulated",
    "Adaptive",
    "Aggregation",
    "Apply",
    "Arrival",
    "Asynchronous",
    "Buffer",
    "Buffered",
    "Cancel",
    "Change",
    "Curve",
    "Deadline",
    "Decision",
    "Decoupled",
    "DelayCompensated",
    "Discard",
    "Distance",
    "ElasticAveraging",
    "Exponential",
    "Gradient",
    "Hogwild",
    "InPlace",
    "Keep",
    "Linear",
    "LocalSteps",
    "LossDriven",
    "Mix",
    "Outer",
    "PerLearningRate",
    "Plateau",
    "Portion",
    "Rebase",
    "Release",
    "Replace",
    "Robust",
    "Sandblaster",
    "SmoothSwitch",
    "StaleSynchronous",
    "Step",
    "Synchronous",
    "Threshold",
    "Throughput",
    "combined",
    "parse",
    "register",
    "registered",
    "released",
    "text_of",
]
