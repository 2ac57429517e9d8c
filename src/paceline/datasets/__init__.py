"""Programs that are built in, and the resolver of PROGRAM. Torch is imported when one is loaded, not before."""

from paceline.datasets.resolve import PROGRAMS, load_program

__all__ = ["PROGRAMS", "load_program"]
