"""Virtual time: the event queue, and the durations that fill it. No torch."""

from paceline.clock.base import Distribution
from paceline.clock.delay import Delay
from paceline.clock.distributions import parse
from paceline.clock.events import EventQueue
from paceline.clock.times import Times

__all__ = ["Delay", "Distribution", "EventQueue", "Times", "parse"]
