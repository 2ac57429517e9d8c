"""Virtual time: the event queue, and the durations that fill it. No torch."""

from paceline.clock.distributions import Distribution, parse
from paceline.clock.times import Delay, EventQueue, Times

__all__ = ["Delay", "Distribution", "EventQueue", "Times", "parse"]
