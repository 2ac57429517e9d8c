"""Workers in processes: what becomes of a run, and of them, when one fails."""

import psutil
import pytest

from paceline import InputError, NonFiniteError, WaitTimeoutError, WorkerError, schedule_parameters
from tests.parameter_scheduling.scheduled_programs import Mean


@pytest.fixture(autouse=True)
def _nothing_is_left() -> object:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert not {child.pid for child in psutil.Process().children(recursive=True)} - before


def run(fault: str, engine: str = "local", **options: object) -> object:
    return schedule_parameters(
        Mean(fault),
        "cyclic",
        workers=2,
        engine=engine,
        updates=8,
        tolerance=None,
        **options,  # type: ignore[arg-type]
    )


def test_a_program_of_ones_own_runs_in_processes() -> None:
    assert run("").values.tolist() == [10.0, 11.0, 12.0, 13.0]  # type: ignore[attr-defined]


def test_a_worker_that_is_killed_is_named() -> None:
    with pytest.raises(WorkerError, match=r"worker 1 \(pid \d+\) ended before the run did: killed by SIGKILL"):
        run("killed")


def test_a_worker_that_fails_has_its_traceback() -> None:
    with pytest.raises(WorkerError, match=r"worker 1 failed: KeyError: 'a bug of the program'\n\nTraceback") as raised:
        run("raises")
    assert "scheduled_programs.py" in str(raised.value)


def test_a_worker_that_does_not_answer_is_waited_for_no_longer_than_said() -> None:
    # It has to answer twice before, so the time is ample for that.
    with pytest.raises(WaitTimeoutError, match=r"worker 1 has not answered main within 5 s; write a larger timeout_s="):
        run("silent", timeout_s=5)


def test_ctrl_c_ends_them() -> None:
    with pytest.raises(KeyboardInterrupt):
        run("interrupted")


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("shape", InputError, r"push returned an array of shape \(17,\) for 1 blocks"),
        ("infinite", NonFiniteError, r"the objective is not finite under cyclic"),
        ("overflow", NonFiniteError, r"block 0 has values that are not finite under cyclic"),
    ],
)
@pytest.mark.parametrize("engine", ["virtual", "local"])
def test_faults_of_a_program_are_the_same_in_both(engine: str, fault: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run(fault, engine)


def test_a_dependency_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="or write bound=none"):
        schedule_parameters(Mean("dependency"), "cyclic:at_once=2", workers=2)


def test_what_cannot_be_sent_is_refused() -> None:
    program = Mean()
    program.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="can't be sent to another process"):
        schedule_parameters(program, workers=2, engine="local")
