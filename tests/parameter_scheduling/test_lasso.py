"""Lasso under every scheduler: textbook, scikit-learn, dependency, priority, and the same bits in processes."""

from statistics import median

import numpy as np
import pytest

from paceline import InputError, Lasso, NonFiniteError, schedule_parameters
from tests.parameter_scheduling.scheduled_programs import design, lasso

SCHEDULERS = ("cyclic", "uniform", "priority", "cyclic:at_once=4", "uniform:at_once=4", "priority:at_once=4")


def test_one_worker_and_a_cycle_are_textbook_coordinate_descent_bit_for_bit() -> None:
    program, _ = lasso()
    matrix = np.asfortranarray(program.X)  # columns are contiguous, as a dot product's bits depend on strides
    beta, rest = np.zeros(program.blocks), program.y.copy()
    for _ in range(7):
        for j in range(program.blocks):
            column = matrix[:, j]
            square = column @ column
            product = column @ rest + square * beta[j]
            new = np.sign(product) * max(abs(product) - program.weight, 0) / square
            if new != beta[j]:
                rest -= (new - beta[j]) * column
            beta[j] = new
    run = schedule_parameters(program, "cyclic", workers=1, updates=7 * program.blocks, tolerance=None)
    assert run.values.tobytes() == beta.tobytes()
    assert run.history[-1].updates == 7 * program.blocks == run.history[-1].rounds


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_optimum_is_that_of_scikit_learn(scheduler: str) -> None:
    from sklearn.linear_model import Lasso as Reference

    program, best = lasso(correlation=0.3)
    run = schedule_parameters(program, scheduler, workers=3, tolerance=1e-15)
    assert run.objective <= best * (1 + 1e-8)
    alpha = program.weight / program.rows
    reference = Reference(alpha=alpha, fit_intercept=False, tol=1e-15, max_iter=10**6).fit(program.X, program.y)
    # Coefficients go with the square root of the objective: 1e-8 of it leaves 1e-4 of them; what is found is nearer.
    assert np.abs(run.values - reference.coef_).max() <= 1e-6 * np.abs(reference.coef_).max()
    assert (run.values != 0).tolist() == (reference.coef_ != 0).tolist()


def test_a_run_does_not_end_before_each_block_was_looked_at() -> None:
    """With this η a block that once stood still is hardly ever drawn, and the others soon move no more."""
    program, best = lasso(correlation=0.3)
    run = schedule_parameters(program, "priority:eta=0.001", evaluate_every=1, tolerance=1e-9)
    assert "updates of all blocks" in run.ended
    assert run.objective <= best * (1 + 1e-6)


@pytest.mark.parametrize("scheduler", ["cyclic", "uniform:at_once=5", "priority:at_once=5"])
@pytest.mark.parametrize("workers", [1, 3])
def test_processes_compute_the_same_bits(scheduler: str, workers: int) -> None:
    program, _ = lasso()
    one, other = (
        schedule_parameters(program, scheduler, workers=workers, engine=engine, updates=150, tolerance=None, seed=4)
        for engine in ("virtual", "local")
    )
    assert one.values.tobytes() == other.values.tobytes()
    assert [each.objective for each in one.history] == [each.objective for each in other.history]
    last, its = one.history[-1], other.history[-1]
    assert (last.pushed_bytes, last.sent_bytes) == (its.pushed_bytes, its.sent_bytes)


def test_what_is_sent_is_chosen_values_and_partial_sums() -> None:
    program, _ = lasso()
    run = schedule_parameters(program, "uniform:at_once=4,bound=none", workers=3, updates=40, tolerance=None)
    last = run.history[-1]
    assert last.rounds == 10
    assert last.pushed_bytes == 3 * 40 * 2 * 8  # two sums of each block from each worker
    assert last.sent_bytes == 3 * 40 * 3 * 8  # number, value, new value


def test_as_many_workers_as_one_likes() -> None:
    program, _ = lasso()
    runs = [schedule_parameters(program, "cyclic", workers=n, updates=200, tolerance=None) for n in (1, 2, 7)]
    for run in runs[1:]:  # sums of 120 products in another order
        assert np.allclose(run.values, runs[0].values, rtol=0, atol=1e-13)


@pytest.mark.parametrize("scheduler", ["cyclic", "uniform", "priority"])
def test_correlated_columns_at_once_diverge_and_the_check_prevents_it(scheduler: str) -> None:
    """With correlation 0.5 the largest eigenvalue of XᵀX is about P/2: eight at once are too many."""
    program, best = lasso(200, 40, correlation=0.5)
    unchecked = f"{scheduler}:at_once=16,bound=none"
    with pytest.raises(NonFiniteError, match=r"write bound=0.1, or at_once=1"):
        schedule_parameters(program, unchecked, tolerance=None)
    few = schedule_parameters(program, unchecked, updates=400, tolerance=None)
    assert few.ended.startswith("400 updates were made; the objective has risen from ")
    run = schedule_parameters(program, f"{scheduler}:at_once=16,candidates=32", tolerance=1e-15)
    assert run.objective <= best * (1 + 1e-8)


def test_priority_needs_half_of_the_updates_of_uniform_choice_where_few_coefficients_count() -> None:
    needed: dict[str, list[int]] = {"uniform": [], "priority": []}
    for seed in range(5):
        program, best = lasso(400, 200, seed=seed, share=0.1)
        for scheduler, found in needed.items():
            run = schedule_parameters(
                program, scheduler, workers=1, target=best * (1 + 1e-4), tolerance=None, evaluate_every=10, seed=seed
            )
            updates = run.updates_to(best * (1 + 1e-4))
            assert updates is not None
            found.append(updates)
    assert median(needed["priority"]) <= median(needed["uniform"]) / 2, needed


def test_the_simulated_clock_has_a_round_last_as_long_as_its_slowest_worker() -> None:
    program, _ = lasso(rows=121)  # 61 and 60 rows
    run = schedule_parameters(
        program, "cyclic:at_once=2,bound=none", workers=2, updates=20, tolerance=None, operation_s=0.5, message="0.25"
    )
    assert run.history[-1].time_s == 10 * (2 * 61 * 0.5 + 0.25)


def test_messages_take_times_drawn_for_each_worker() -> None:
    program, _ = lasso()
    times = [
        schedule_parameters(
            program, "cyclic", workers=n, updates=400, tolerance=None, operation_s=0, message="exponential:mean=1"
        )
        .history[-1]
        .time_s
        for n in (1, 4)
    ]
    # The largest of four exponential times has mean 1 + 1/2 + 1/3 + 1/4 = 2.08; 400 rounds: within 20 %.
    assert times[0] == pytest.approx(400, rel=0.2)
    assert times[1] == pytest.approx(400 * 25 / 12, rel=0.2)


def test_a_run_is_drawn(tmp_path: object) -> None:
    from pathlib import Path
    from xml.etree import ElementTree

    path = Path(str(tmp_path)) / "run.svg"
    program, _ = lasso()
    schedule_parameters(program, updates=80).plot(path)
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("matrix", "y", "penalty", "instead"),
    [
        (np.ones((3, 2)), np.ones(4), 1.0, "X has 3 rows and y has 4"),
        (np.array([[1.0, 0], [2, 0]]), np.ones(2), 1.0, "column 1 of X is all zeros"),
        (np.array([[1.0, np.nan]]), np.ones(1), 1.0, "not finite"),
        (np.ones(3), np.ones(3), 1.0, "2 dimension"),
        ([["a"]], [1.0], 1.0, "no array of numbers"),
        (np.ones((3, 2)), np.ones(3), 0.0, "write penalty=0.1"),
    ],
)
def test_refused_problems(matrix: object, y: object, penalty: float, instead: str) -> None:
    with pytest.raises(InputError, match=instead):
        Lasso(matrix, y, penalty=penalty)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"workers": 200}, "write workers=120"),
        ({"workers": 0}, "write workers=1"),
        ({"seed": -1}, "write seed=0"),
        ({"engine": "locl"}, "did you mean 'local'"),
        ({"scheduler": "priority:at_once=41"}, "write at_once=40"),
        ({"scheduler": 7}, 'write scheduler="priority"'),
        ({"engine": "local", "message": "0.1"}, "of the simulated clock"),
        ({"engine": "local", "operation_s": 0.0}, "of the simulated clock"),
        ({"message": "fast"}, "fast"),
        ({"operation_s": -1.0}, "write operation_s=1e-09"),
        ({"updates": -1}, "write updates=0"),
        ({"evaluate_every": 0}, "write evaluate_every=1"),
        ({"tolerance": -1.0}, "write tolerance=1e-10"),
        ({"target": float("nan")}, "write target=None"),
        ({"timeout_s": 0}, "write timeout_s=300"),
    ],
)
def test_refused_runs(options: dict[str, object], instead: str) -> None:
    program, _ = lasso()
    with pytest.raises(InputError, match=instead):
        schedule_parameters(program, **options)  # type: ignore[arg-type]


def test_no_program_is_refused() -> None:
    with pytest.raises(InputError, match=r"write paceline.Lasso"):
        schedule_parameters(design(3, 2))  # type: ignore[arg-type]
