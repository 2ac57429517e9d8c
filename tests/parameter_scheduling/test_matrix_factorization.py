"""Matrix factorisation: each update against a least-squares solver, the whole against alternating least squares."""

import itertools
from typing import Any

import numpy as np
import pytest

from paceline import InputError, MatrixFactorization, schedule_parameters
from paceline.parameter_scheduling.schedulers import balanced
from tests.parameter_scheduling.scheduled_programs import factorization


def dense(program: MatrixFactorization) -> tuple[Any, Any]:
    """The matrix, and which of it is known."""
    whole, known = np.zeros(program.shape), np.zeros(program.shape, bool)
    whole[program.row, program.column], known[program.row, program.column] = program.value, True
    return whole, known


def objective(program: MatrixFactorization, w: Any, h: Any) -> float:
    whole, known = dense(program)
    return float((((whole - w @ h) ** 2)[known]).sum() + program.weight * ((w**2).sum() + (h**2).sum()))


def ridge(matrix: Any, y: Any, penalty: float) -> Any:
    """The minimum of ‖y - matrix·x‖² + penalty·‖x‖², by a solver of plain least squares."""
    columns = matrix.shape[1]
    stacked = np.vstack([matrix, np.sqrt(penalty) * np.eye(columns)])
    return np.linalg.lstsq(stacked, np.concatenate([y, np.zeros(columns)]), rcond=None)[0]


@pytest.mark.parametrize("workers", [1, 4])
def test_each_update_is_the_closed_form_of_its_block(workers: int) -> None:
    program = factorization()
    whole, known = dense(program)
    w, h = np.zeros((30, 3)), program.initial().copy()
    for done in range(1, 10):
        rank = (done - 1) % 3
        others = [k for k in range(3) if k != rank]
        rest = whole - w[:, others] @ h[others]
        for i in range(30):
            w[i, rank] = ridge(h[rank][known[i]][:, None], rest[i][known[i]], program.weight)[0]
        for j in range(20):
            h[rank, j] = ridge(w[known[:, j], rank][:, None], rest[known[:, j], j], program.weight)[0]
        run = schedule_parameters(program, "cyclic", workers=workers, updates=done, tolerance=None)
        assert run.row_values is not None
        # Sums of at most 30 products; after nine updates their rounding has not grown.
        assert np.allclose(run.row_values, w, rtol=0, atol=1e-12)
        assert np.allclose(run.values, h, rtol=0, atol=1e-12)
        assert run.objective == pytest.approx(objective(program, w, h), rel=1e-12)


def test_it_ends_where_alternating_least_squares_does() -> None:
    """From H as it was found, ALS, which solves for whole rows, finds nothing better."""
    program = factorization()
    run = schedule_parameters(program, "cyclic", workers=2, tolerance=1e-14)
    whole, known = dense(program)
    w, h = np.zeros((30, 3)), run.values.copy()
    for _ in range(20):
        for i in range(30):
            w[i] = ridge(h[:, known[i]].T, whole[i, known[i]], program.weight)
        for j in range(20):
            h[:, j] = ridge(w[known[:, j]], whole[known[:, j], j], program.weight)
    # The run ends when a pass gains 1e-14 of the objective; some hundred more such passes gain no more than this.
    assert objective(program, w, h) == pytest.approx(run.objective, rel=1e-9)


@pytest.mark.parametrize("scheduler", ["cyclic", "uniform", "priority", "priority:at_once=2"])
def test_the_objective_never_rises_one_rank_at_a_time(scheduler: str) -> None:
    program = factorization()
    run = schedule_parameters(program, scheduler, workers=3, updates=60, tolerance=None, evaluate_every=1)
    objectives = [each.objective for each in run.history]
    # Each update is an exact minimum: only rounding may raise it. Of two ranks one waits, as they depend on each other.
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(objectives))
    assert run.history[-1].rounds == 60
    assert objectives[-1] < objectives[0] / 5


@pytest.mark.parametrize("scheduler", ["cyclic", "priority:at_once=2,bound=none"])
def test_processes_compute_the_same_bits(scheduler: str) -> None:
    program = factorization()
    one, other = (
        schedule_parameters(program, scheduler, workers=3, engine=engine, updates=20, tolerance=None)
        for engine in ("virtual", "local")
    )
    assert one.values.tobytes() == other.values.tobytes()
    assert one.row_values is not None
    assert other.row_values is not None
    assert one.row_values.tobytes() == other.row_values.tobytes()
    assert [each.objective for each in one.history] == [each.objective for each in other.history]


def test_rows_are_divided_by_their_entries() -> None:
    """Row i has about 200 / (i + 1) entries: ranges of rows would give the first of four workers most of them."""
    row = np.concatenate([np.full(200 // (i + 1), i) for i in range(40)])
    column = np.concatenate([np.arange(200 // (i + 1)) for i in range(40)])
    program = MatrixFactorization(row, column, np.ones(len(row)), shape=(40, 200), ranks=2, penalty=1.0)
    costs = program.row_costs()
    mean = costs.sum() / 4
    assert max(costs[part].sum() for part in balanced(costs, 4)) <= 1.02 * mean
    assert max(costs[part].sum() for part in np.split(np.arange(40), 4)) > 2.5 * mean
    run = schedule_parameters(program, "cyclic", workers=4, updates=2, tolerance=None, operation_s=1.0, message="0")
    assert run.history[-1].time_s <= 2 * 1.02 * mean


@pytest.mark.parametrize(
    ("change", "instead"),
    [
        ({"row": [0, 9]}, "below 3"),
        ({"column": [0, -1]}, "below 2"),
        ({"row": [0.5, 1.0]}, "whole numbers"),
        ({"value": [1.0]}, "give as many of each"),
        ({"value": [1.0, np.inf]}, "not finite"),
        ({"ranks": 0}, "write ranks=1"),
        ({"penalty": 0}, "write penalty=0.1"),
    ],
)
def test_refusals(change: dict[str, Any], instead: str) -> None:
    usual: dict[str, Any] = {"row": [0, 1], "column": [0, 1], "value": [1.0, 2.0], "shape": (3, 2), "ranks": 1}
    with pytest.raises(InputError, match=instead):
        MatrixFactorization(**usual | {"penalty": 1.0} | change)
