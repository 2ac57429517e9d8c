"""A block of Python code that runs too long is ended, in any thread and whatever it catches."""

import subprocess
import sys
import threading
from typing import NoReturn

import pytest

from paceline.core.deadline import limited

# Enough for the block to have begun, whatever else runs on the host.
SOON_S = 0.05


def endless() -> NoReturn:
    while True:
        pass


def stubborn() -> NoReturn:
    while True:
        try:
            endless()
        except Exception:
            continue


def otherwise() -> None:
    try:
        endless()
    except BaseException:
        raise ValueError("made of it") from None


def quiet() -> None:
    try:
        endless()
    except BaseException:
        return


@pytest.mark.parametrize("block", [endless, stubborn, otherwise, quiet])
def test_a_block_is_ended_whatever_it_catches(block: object) -> None:
    with pytest.raises(TimeoutError, match=r"not done within 0.05 s"), limited(SOON_S):
        block()  # type: ignore[operator]


def test_a_thread_is_ended_and_no_other() -> None:
    found = list[str]()

    def work() -> None:
        try:
            with limited(SOON_S):
                endless()
        except TimeoutError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == ["not done within 0.05 s"]


def test_a_block_that_is_done_leaves_nothing_behind() -> None:
    before = threading.active_count()
    with limited(600):
        pass
    with pytest.raises(ValueError, match="its own"), limited(600):
        raise ValueError("its own")
    assert threading.active_count() == before


PROFILED = """
import cProfile, faulthandler
from paceline.core.deadline import limited

faulthandler.dump_traceback_later(60, exit=True)
try:
    with limited({seconds}):
        while {endless}:
            pass
except TimeoutError:
    print("ended")

def function():
    return 1

profile = cProfile.Profile()
for number in range(200):
    if number == 100:
        profile.enable()
    function()
print("profiled")
"""


@pytest.mark.parametrize(("seconds", "endless", "said"), [(600, False, []), (SOON_S, True, ["ended"])])
def test_the_interpreter_is_left_as_it_was(seconds: float, endless: bool, said: list[str]) -> None:
    # CPython 3.11 looks for what is pending before the first instruction of each function that is profiled, again and
    # again while something is.
    code = PROFILED.format(seconds=seconds, endless=endless)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split()) == (0, [*said, "profiled"]), ended.stderr
