"""Virtual time: the event queue, and the durations and networks that fill it. No torch."""

from paceline.clock.distributions import Distribution, parse
from paceline.clock.network import Network
from paceline.clock.times import Delay, EventQueue, Times

__all__ = ["Delay", "Distribution", "EventQueue", "Network", "Times", "parse"]
