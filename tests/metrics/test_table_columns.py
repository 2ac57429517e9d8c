"""What a table of strategies shows."""

from paceline.metrics.repeats import MEASURES, Estimate
from paceline.metrics.table_columns import BRIEF, NONE, PACE, REACHED, Entry, grid, labels

MEAN = {"test_accuracy": 0.9512, "test_accuracy_mean": 0.8, "test_loss_mean": 0.25, "updates": 12345.0}


def cells(entry: Entry) -> dict[tuple[str, str], str]:
    columns, lines = grid((*REACHED, *PACE), [entry])
    return {(c.group, c.title): text for c, text in zip(columns, lines[0], strict=True)}


def test_accuracies_are_percent_and_differences_points() -> None:
    found = cells(Entry("x", MEAN, {MEASURES[0]: Estimate(0.0346, 0.01, 0.0146, 0.0546, 5)}, 5))
    assert found["test accuracy, %", "end"] == "95.12"
    assert found["test accuracy, %", "difference"] == "+3.46 ± 2.00"
    assert found["", "updates"] == "12,345"


def test_one_round_shows_no_interval_and_the_baseline_no_difference() -> None:
    one = Entry("x", MEAN, {MEASURES[0]: Estimate(-0.01, None, None, None, 1)}, 1)
    assert cells(one)["test accuracy, %", "difference"] == "-1.00"
    assert cells(Entry("x", MEAN, None, 1))["test accuracy, %", "difference"] == "baseline"


def test_columns_that_nobody_has_a_figure_for_are_left_out() -> None:
    columns, lines = grid(BRIEF, [Entry("a", {"updates": 1.0}, None, 1), Entry("b", {}, {}, 1)])
    assert ([c.title for c in columns], lines) == (["updates"], [["1"], [NONE]])


def test_labels_say_what_differs() -> None:
    texts = ["replicas=8", "replicas=8 aggregation=buffered:k=4", "replicas=2 stages=2"]
    assert list(labels(texts).values()) == [
        "replicas=8 aggregation=synchronous",
        "replicas=8 aggregation=buffered:k=4",
        "replicas=2 stages=2 aggregation=synchronous",
    ]


def test_labels_differ_wherever_strategies_do() -> None:
    texts = ["", "threads=2", "aggregation=asynchronous", "replicas=3 threads=2"]
    assert len(set(labels(texts).values())) == len(texts)


def test_one_strategy_alone_is_called_by_its_policy() -> None:
    assert labels(["replicas=8 aggregation=hogwild"]) == {"replicas=8 aggregation=hogwild": "hogwild"}
