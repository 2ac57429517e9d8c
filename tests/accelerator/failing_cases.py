"""Functions that fail, to test that it is noticed."""

import os


def case_that_raises() -> float:
    return 1 / 0


def case_that_dies() -> None:
    os._exit(7)
