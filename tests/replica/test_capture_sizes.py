"""Which sizes a capture leaves open: the number of samples, and those in which batches differ that were looked at."""

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, TensorDataset

from paceline.core.errors import InputError
from paceline.program import Program
from paceline.replica.base import Batch
from paceline.replica.capture.capture import capture
from paceline.replica.capture.looks import LOOKS, other_inputs
from paceline.replica.pipeline.prepare import capture_for_stages
from paceline.strategy import Strategy

WIDTH, KINDS = 4, 11


class Tagger(nn.Module):
    """Scores of each token, from it and from the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(KINDS, WIDTH)
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden + hidden.mean(1, keepdim=True))


def model() -> Tagger:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Tagger()


def tokens(samples: int, length: int) -> Tensor:
    return torch.arange(samples * length).view(samples, length) % KINDS


def loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def padded(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Cut a batch to its longest sample: the sample of number n has n tokens."""
    length = max(int(row[0][0]) for row in rows)
    batch = torch.stack([row[0] for row in rows])[:, :length]
    return batch, batch


def program(train: Any, **settings: Any) -> Program:
    return Program(model, loss, functools.partial(torch.optim.SGD, lr=0.1), train, **settings)


def test_only_the_number_of_samples_is_open_where_no_size_differs() -> None:
    module = model()
    captured = capture(module, tokens(6, 5), others=())
    assert [type(dim) for dim in captured.input_spec.leaves[0].dims or ()] == [str, int]
    for samples in (1, 2, 7):
        value = tokens(samples, 5)
        assert torch.equal(captured.module(*captured.flatten(value))[0], module(value))
    refused = r"dim 1 of input is 8, but .* holds for 5 alone: no batch that was looked at .*; pad the inputs to 5, or"
    with pytest.raises(InputError, match=refused):
        captured.flatten(tokens(6, 8))


def test_a_size_that_differs_in_another_batch_is_open() -> None:
    module = model()
    captured = capture(module, tokens(6, 5), others=[tokens(6, 5), tokens(3, 7)])
    for samples, length in ((6, 5), (3, 7), (2, 9)):
        value = tokens(samples, length)
        assert torch.equal(captured.module(*captured.flatten(value))[0], module(value))


@pytest.mark.parametrize("train", [(tokens(8, 5), tokens(8, 5)), TensorDataset(tokens(8, 5), tokens(8, 5))])
def test_there_is_nothing_to_look_at_in_tensors(train: Any) -> None:
    assert other_inputs(program(train), 2) == ()
    assert other_inputs(program(train), 1) == ()


def test_batches_that_a_function_collates_are_looked_at_all_over_the_data() -> None:
    lengths = torch.arange(1, 13)
    rows = lengths.unsqueeze(1).expand(-1, 12).contiguous()
    padded_program = program(TensorDataset(rows, rows), loader={"collate_fn": padded})
    others = other_inputs(padded_program, 4)
    assert others is not None
    assert [tuple(each.shape) for each in others] == [(4, 4), (4, 8), (4, 12)]
    captured = capture_for_stages(padded_program, Strategy(stages=2), model(), Batch(rows[:4, :4] % KINDS, None, 4))
    captured.flatten(tokens(2, 9))


def growing(replica: int = 0, replicas: int = 1, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    for length in range(2, 100):
        yield tokens(3, length), tokens(3, length)


class Growing(IterableDataset[Any]):
    """Its items are batches."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return growing()


@pytest.mark.parametrize("source", [program(growing), program(Growing(), loader={"batch_size": None})])
def test_the_first_batches_of_a_stream_are_looked_at(source: Program) -> None:
    others = other_inputs(source, 3)
    assert others is not None
    assert [each.shape[1] for each in others] == list(range(2, 3 + LOOKS))


def test_data_that_cannot_be_looked_at_leave_all_sizes_open() -> None:
    def broken(rows: list[Any]) -> Any:
        raise OSError("the disk is gone")

    train = TensorDataset(tokens(8, 5), tokens(8, 5))
    assert other_inputs(program(train, loader={"collate_fn": broken}), 2) is None


def test_what_samples_draw_to_be_looked_at_is_not_drawn_from_the_process() -> None:
    def drawing(rows: list[Any]) -> Any:
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
        return padded(rows)

    def states() -> tuple[Any, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    drawn, before = list[Any](), states()
    train = TensorDataset(tokens(8, 5) + 1, tokens(8, 5))
    assert other_inputs(program(train, loader={"collate_fn": drawing}), 2)
    assert len(drawn) == LOOKS
    assert states() == before
