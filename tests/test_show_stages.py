"""Where a pipeline's model is cut, without training it."""

import functools
import re

import pytest
import torch

from paceline import InputError, Program, show_stages

LOSS = torch.nn.functional.mse_loss
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def program(layers: int = 6) -> Program:
    torch.manual_seed(0)
    data = torch.randn(64, 8)
    return Program(
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers))),
        loss=LOSS, optimizer=SGD, train=(data, data), batch_size=16,
    )  # fmt: skip


def rows(table: str) -> list[list[str]]:
    """The cells of each stage's line."""
    return [re.split(r"  +", line.strip()) for line in table.splitlines()[3:]]


def test_a_line_for_each_stage_with_its_ends_and_what_it_sends() -> None:
    table = show_stages(program(), "stages=3 micro_batches=4 cuts=2,3")
    assert table.startswith("3 stages; slowest: ")
    found = rows(table)
    assert [line[:3] for line in found] == [["0", "0", "1"], ["1", "2", "2"], ["2", "3", "5"]]
    assert [line[4] for line in found] == ["144", "72", "216"]
    assert [line[5:] for line in found] == [["to 1: 128 B"], ["to 2: 128 B"], []]  # 4 samples of 8 floats


def test_how_many_take_turns_at_each_stage() -> None:
    table = show_stages(program(), "stages=[2,1] cuts=4")
    assert table.splitlines()[2].split()[:3] == ["stage", "replicas", "from"]
    assert [line[:4] for line in rows(table)] == [["0", "2", "0", "3"], ["1", "1", "4", "5"]]


def test_where_nothing_is_said_the_cut_is_chosen() -> None:
    found = rows(show_stages(program(), "stages=2"))
    assert [found[0][1], found[-1][2]] == ["0", "5"]
    assert int(found[1][1]) == int(found[0][2]) + 1


def test_interleaved_parts_are_all_shown() -> None:
    assert len(rows(show_stages(program(), "stages=2 schedule=interleaved"))) == 4


@pytest.mark.usefixtures("two_threads")
def test_this_process_is_left_as_it_was() -> None:
    made = program()
    torch.manual_seed(5)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(5)
    show_stages(made, "stages=2 threads=1")
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)  # the same numbers, bit for bit
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("replicas=1", "stages=1 leaves the model whole, so there is no cut; write stages=2"),
        ("micro_batches=4", "stages=1 leaves the model whole, so there is no cut; write stages=2"),
        ("stages=7", "stages=7 needs 6 places to cut the model"),
        ("stages=2 schedule=interleaved micro_batches=3", "micro_batches=3 is no multiple of stages=2"),
        ("stages=2 cuts=nowhere", "unknown module or node in cuts 'nowhere'"),
        ("stages=2 aggregation=hogwild", "aggregation=hogwild"),
    ],
)
def test_what_train_would_refuse_is_refused(strategy: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        show_stages(program(), strategy)
