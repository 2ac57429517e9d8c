"""What ``import paceline`` offers, and what it costs."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import paceline

PUBLIC = [
    "Aggregation",
    "Apply",
    "Arrival",
    "Asynchronous",
    "Buffered",
    "CallbackError",
    "Cancel",
    "CollectiveError",
    "Comparison",
    "Deadline",
    "Decision",
    "Decoupled",
    "DelayCompensated",
    "Discard",
    "ElasticAveraging",
    "Hogwild",
    "InputError",
    "LBFGS",
    "Lamb",
    "Lars",
    "Lasso",
    "LocalSteps",
    "MatrixFactorization",
    "NonFiniteError",
    "Pace",
    "PacelineError",
    "Plans",
    "Portion",
    "Program",
    "Reducer",
    "Reduction",
    "Release",
    "Robust",
    "Run",
    "Sandblaster",
    "ScheduledProgram",
    "ScheduledRun",
    "Scheduler",
    "SharedRuns",
    "SmoothSwitch",
    "StaleSynchronous",
    "Strategy",
    "Synchronous",
    "WaitTimeoutError",
    "Worker",
    "WorkerError",
    "__version__",
    "callbacks",
    "compare",
    "cut",
    "join",
    "launch",
    "load",
    "pace",
    "plan",
    "predict",
    "predictor",
    "register",
    "resume",
    "scaled_learning_rate",
    "schedule_parameters",
    "serve",
    "share_workers",
    "show_mesh",
    "show_shards",
    "show_stages",
    "synchronised_batchnorm",
    "train",
    "warmup",
]


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names_are_exactly_these_and_sorted() -> None:
    assert paceline.__all__ == PUBLIC == sorted(PUBLIC)
    assert dir(paceline) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_loads(name: str) -> None:
    assert name in vars(paceline) or paceline.__getattr__(name) is vars(paceline)[name]


def test_version_is_that_of_the_installed_package() -> None:
    assert paceline.__version__ == version("paceline")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'paceline' has no attribute 'Synchronos'"):
        paceline.Synchronos  # noqa: B018  # type: ignore[attr-defined]


def test_importing_paceline_imports_no_torch() -> None:
    assert run_python("import sys, paceline; print('torch' in sys.modules)") == "False"


def test_a_policy_from_the_package_is_the_one_from_its_module() -> None:
    from paceline.aggregation.smooth_switch import SmoothSwitch

    assert paceline.SmoothSwitch is SmoothSwitch
