"""Virtual time: the event queue, and the durations that fill it. No torch."""

from paceline.clock.distributions import Distribution, parse
from paceline.clock.event_queue import EventQueue
from paceline.clock.times import Delay, Times

__all__ = ["Delay", "Distribution", "EventQueue", "Times", "parse"]
