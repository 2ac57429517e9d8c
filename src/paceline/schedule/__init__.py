"""Orders in which the workers of a pipeline process the micro-batches. No torch.

Every file of this folder is imported, so a schedule is added by adding its file.
"""

import importlib
import pkgutil

from paceline.schedule.base import Action, Kind, Schedule, canonical, names, parse
from paceline.schedule.check import check, in_flight
from paceline.schedule.dependencies import Dependencies, Need
from paceline.schedule.draw import draw
from paceline.schedule.simulate import StageTimes, Timed, simulate, timeline

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = [
    "Action",
    "Dependencies",
    "Kind",
    "Need",
    "Schedule",
    "StageTimes",
    "Timed",
    "canonical",
    "check",
    "draw",
    "in_flight",
    "names",
    "parse",
    "simulate",
    "timeline",
]
