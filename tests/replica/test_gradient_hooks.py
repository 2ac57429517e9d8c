"""Gradients are told of as soon as they are final, once each, and are those that are told of at the end."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import PacelineError
from paceline.replica.base import EMPTY, GradientSink
from paceline.replica.single import Single
from tests import oracle
from tests.engine import programs
from tests.engine.distributed_cases import Checkpointed, LookedUp
from tests.replica.test_replicas import autograd, batch, same


class Notes(GradientSink):
    """Copies what it is told; every ``per_delta``-th micro-step is a last one."""

    def __init__(self, per_delta: int = 1) -> None:
        self.per_delta, self.made = per_delta, 0
        self.told: dict[int, tuple[Tensor, int]] = {}
        self.order: list[int] = []

    def is_last_micro_step(self) -> bool:
        self.made += 1
        return self.made % self.per_delta == 0

    def ready(self, index: int, gradient: Tensor, samples: int) -> None:
        assert index not in self.told
        self.told[index] = gradient.clone(), samples
        self.order.append(index)

    def taken(self) -> dict[int, tuple[Tensor, int]]:
        told, self.told, self.order = self.told, {}, []
        return told


def deltas(program: Any, sink: Notes, rounds: list[list[list[int]]], micro_steps: int = 1) -> list[list[int]]:
    """Compute Δs of these batches; checks each, and returns what was told of each before its end."""
    mine, state = autograd(program)
    replica, early = Single(mine, micro_steps), []
    with replica.sending_gradients(sink):
        for batches in rounds:
            replica.adopt(state)
            for clock, indices in enumerate(batches):
                replica.advance(batch(program, *indices) if indices else EMPTY, clock)
            early.append(list(sink.order))
            measured = replica.finish(state.layout.new())
            told, out = sink.taken(), state.layout.new()
            assert sorted(told) == list(range(len(out.views.parameters)))
            for index, (gradient, samples) in told.items():
                out.views.parameters[index].copy_(gradient)
                assert samples == measured.samples == sum(map(len, batches))
            same(out, oracle.Plain(program).gradient([*chain(*batches)]))
            assert measured.finite
    return early


def test_the_last_layer_comes_first_once_a_pass_has_been_seen() -> None:
    first, second = deltas(programs.program(), Notes(), [[[1, 2]], [[3]]])
    assert first == []
    assert sorted(second) == [0, 1, 2, 3]
    assert set(second[:2]) == {2, 3}


def test_accumulated_gradients_are_final_in_the_last_pass() -> None:
    rounds = [[[1, 2], [3]], [[4], [5, 6, 7]]]
    assert [len(told) for told in deltas(programs.program(), Notes(per_delta=2), rounds, 2)] == [0, 4]


def test_without_samples_in_the_last_pass_all_comes_at_the_end() -> None:
    sink = Notes(per_delta=3)
    rounds = [[[1], [2], [3]], [[1], [2], []]]
    assert [len(told) for told in deltas(programs.program(), sink, rounds, 3)] == [0, 0]


def test_a_tied_weight_is_final_once() -> None:
    *_, told = deltas(programs.program(model=programs.Tied), Notes(), [[[1, 2]], [[3]]])
    assert len(told) == 5


def test_a_frozen_parameter_is_none_of_it() -> None:
    *_, told = deltas(programs.program(model=programs.frozen), Notes(), [[[1, 2]], [[3]]])
    assert len(told) == 2


def test_what_two_checkpoints_add_to_comes_at_the_end() -> None:
    *_, second, third = deltas(programs.program(model=Checkpointed), Notes(), [[[1, 2]], [[3]], [[4]]])
    assert sorted(second) == sorted(third) == [0, 1, 4, 5]


class LaterTwice(Checkpointed):
    """Its first pass uses the checkpointed layer once, as if that were all."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) if self.passes > 1 else self.head(torch.tanh(self.shared(self.first(x))))


def test_what_is_added_to_after_it_was_sent_is_named() -> None:
    program = programs.program(model=LaterTwice)
    mine, state = autograd(program)
    replica, sink = Single(mine), Notes()
    with replica.sending_gradients(sink):
        replica.adopt(state)
        replica.advance(batch(program, 1), 0)
        replica.finish(state.layout.new())
        sink.taken()
        replica.adopt(state)
        with pytest.raises(PacelineError, match=r"twice to the gradient of shared\..*write use_reentrant=False"):
            replica.advance(batch(program, 2), 1)


def test_a_sparse_gradient_is_told_of_as_a_dense_one() -> None:
    program = programs.program(model=LookedUp)
    mine, state = autograd(program)
    replica, sink, out = Single(mine), Notes(), state.layout.new()
    expected: list[Tensor] = []
    for giving in (False, True):
        sink.taken()
        if giving:
            with replica.sending_gradients(sink):
                for clock in range(2):
                    sink.taken()
                    replica.adopt(state)
                    replica.advance(batch(program, 1, 2), clock)
                    early = len(sink.order)
                    replica.finish(out)
            assert early == 5
            for index, value in enumerate(expected):
                torch.testing.assert_close(sink.told[index][0], value, rtol=0, atol=0)
        else:
            replica.adopt(state)
            replica.advance(batch(program, 1, 2), 0)
            replica.finish(out)
            expected = [view.clone() for view in out.views.parameters]


def test_a_gradient_that_is_not_finite_is_seen() -> None:
    program = programs.program(loss=lambda o, t: nn.functional.cross_entropy(o, t) * float("inf"))
    mine, state = autograd(program)
    replica = Single(mine)
    with replica.sending_gradients(Notes()):
        replica.adopt(state)
        replica.advance(batch(program, 1), 0)
        assert not replica.finish(state.layout.new()).finite


def test_nothing_is_left_behind() -> None:
    program = programs.program()
    mine, state = autograd(program)
    replica, sink, out = Single(mine), Notes(), state.layout.new()
    with replica.sending_gradients(sink):
        pass
    replica.adopt(state)
    replica.advance(batch(program, 1, 2), 0)
    replica.finish(out)
    same(out, oracle.Plain(program).gradient([1, 2]))
    assert not sink.told
    assert sink.made == 0
