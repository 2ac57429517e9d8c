"""Built-in programs, and the resolver of PROGRAM. Torch is imported when a program is loaded, not before."""

from paceline.datasets.resolve import PROGRAMS, load_program

__all__ = ["PROGRAMS", "load_program"]
