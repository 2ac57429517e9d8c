"""Programs and schedulers of one's own: the example, and what importing costs."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import InputError, Scheduler, register, schedule_parameters
from tests.parameter_scheduling.scheduled_programs import Mean, lasso

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parameter-scheduling.md"
EXAMPLE = ROOT / "examples" / "sparse_logistic.py"


def test_the_example_finds_what_liblinear_finds() -> None:
    """Its whole text, with one worker of this process in place of two."""
    text = EXAMPLE.read_text("utf-8")
    assert len(text.splitlines()) <= 60
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text.replace('engine="local", workers=2', "workers=1"), EXAMPLE, "exec"), names)
    images, labels = names["images"], names["program"].labels
    from sklearn.linear_model import LogisticRegression

    reference = LogisticRegression(
        l1_ratio=1, C=1 / 20, solver="liblinear", fit_intercept=False, tol=1e-10, max_iter=10**4, random_state=0
    )
    [best] = reference.fit(images, labels).coef_
    objective = np.logaddexp(0, -labels * (images @ best)).sum() + 20 * np.abs(best).sum()
    # Each of both stops when updates gain 1e-10 of the objective, or about.
    assert names["run"].objective == pytest.approx(objective, rel=1e-7)
    assert (names["run"].values != 0).tolist() == (best != 0).tolist()


def test_the_page_s_program_finds_the_five_coefficients(capsys: pytest.CaptureFixture[str]) -> None:
    program, _ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    exec(program, {})
    assert capsys.readouterr().out.startswith("5 updates of all blocks")


def test_the_example_runs_in_processes(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "27 of 61 coefficients" in done.stdout


def test_without_processes_no_torch_is_imported() -> None:
    code = (
        "import sys, paceline; paceline.schedule_parameters(paceline.Lasso([[1.0], [2.0]], [1.0, 2.0], penalty=1), "
        "workers=1, progress=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@register("largest-first")
@dataclass(frozen=True)
class LargestFirst(Scheduler[Any]):
    """Of all blocks those that moved most last."""

    def start(self, blocks: int, seed: int) -> Any:
        return np.full(blocks, np.inf)

    def propose(self, state: Any) -> Any:
        return np.argsort(-state, kind="stable")[: self.looked_at(len(state))]

    def updated(self, state: Any, chosen: Any, moved: Any) -> Any:
        after = state.copy()
        after[chosen] = moved
        return after


def test_a_scheduler_of_ones_own_has_a_text_form() -> None:
    program, _ = lasso()
    run = schedule_parameters(program, "largest-first:at_once=2,bound=none", updates=80, tolerance=None)
    assert run.scheduler == "largest-first:at_once=2,bound=none"
    assert run.objective < run.history[0].objective


@dataclass(frozen=True)
class Twice(LargestFirst):
    """Wrongly the first block two times."""

    def propose(self, state: Any) -> Any:
        return np.zeros(2, np.int64)


def test_a_scheduler_that_proposes_a_block_twice_is_refused() -> None:
    with pytest.raises(InputError, match="propose each block once at most"):
        schedule_parameters(Mean(), Twice(at_once=2, bound=None), workers=2)


def test_progress_is_drawn_where_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    schedule_parameters(Mean(), workers=2, progress=True)
    assert capsys.readouterr().err != ""
    schedule_parameters(Mean(), workers=2, progress=False)
    assert capsys.readouterr().err == ""


class Wrong(Mean):
    def block_costs(self) -> Any:
        return np.ones(3)


class Missing(Mean):
    def initial(self) -> Any:
        return np.zeros(3)


@pytest.mark.parametrize(("program", "words"), [(Wrong(), r"return 4 finite numbers"), (Missing(), r"for 4 blocks")])
def test_a_program_that_contradicts_itself_is_refused(program: Mean, words: str) -> None:
    with pytest.raises(InputError, match=words):
        schedule_parameters(program, workers=2)
