"""F: which Δs are combined, when, with what weights, and which replicas may go on. No torch.

Every file of this folder is imported, so a policy is added by adding its file.
"""

import importlib
import pkgutil

from paceline.aggregation.adaptive import Adaptive
from paceline.aggregation.asynchronous import Asynchronous
from paceline.aggregation.base import Aggregation, parse
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
from paceline.core.registry import register, registered
from paceline.core.text_form import text_of

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = [
    "Adaptive",
    "Aggregation",
    "Asynchronous",
    "Buffered",
    "Curve",
    "Deadline",
    "Decoupled",
    "DelayCompensated",
    "ElasticAveraging",
    "Exponential",
    "Hogwild",
    "Linear",
    "LocalSteps",
    "LossDriven",
    "Outer",
    "PerLearningRate",
    "Plateau",
    "Robust",
    "Sandblaster",
    "SmoothSwitch",
    "StaleSynchronous",
    "Step",
    "Synchronous",
    "Threshold",
    "Throughput",
    "parse",
    "register",
    "registered",
    "text_of",
]
