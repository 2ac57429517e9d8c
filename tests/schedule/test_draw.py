"""Schedules as tables; those of the docstrings are compared by the contract's test."""

from paceline.schedule import draw, parse


def test_one_worker_is_never_idle() -> None:
    assert draw(parse("1f1b"), 1, 2).splitlines() == [
        "worker 0|0F0 0B0 --- 0F1 0B1 ---",
        "6 of 6 cells are busy: 100 %",
    ]


def test_halves_of_a_backward_have_a_cell_each() -> None:
    assert draw(parse("zero-bubble"), 1, 1).splitlines()[0] == "worker 0|0F0 0I0 0W0"


def test_updates_end_a_backward() -> None:
    assert draw(parse("pipedream-2bw").resolved(2), 2, 4).splitlines()[1] == (
        "worker 1| .  1F0 1B0 --- 1F1 1B1 --U 1F2 1B2 --- 1F3 1B3 --U  .   ."
    )


def test_columns_are_as_wide_as_the_longest_name() -> None:
    rows = draw(parse("gpipe"), 11, 1).splitlines()
    label = len("worker 10|")
    assert [row.index(f"{w}F0", label) for w, row in enumerate(rows[:11])] == [label + 5 * w for w in range(11)]
    assert rows[10][label + 50 :].split() == ["10F0", "10B0", "----", *["."] * 20]


def test_parts_of_one_worker_share_a_row() -> None:
    assert draw(parse("interleaved"), 2, 2).splitlines()[0] == (
        "worker 0|0F0 0F1 2F0 2F1  .   .  2B0 ---  .  2B1 --- 0B0 --- 0B1 ---"
    )
