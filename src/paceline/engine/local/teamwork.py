"""The two sides of a replica of several workers: the leader, which talks to main, and those that follow it."""

import math
import time
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.core.types import Clock
from paceline.engine.gauge import Gauge
from paceline.engine.local.part import OwnPart
from paceline.engine.local.station import LocalStation
from paceline.engine.local.words import Adopt, Advance, End, Finish, Line, Said, say_all
from paceline.engine.team.traffic import Traffic
from paceline.program import map_tree
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.state import State


@final
class Led(Replica):
    """All workers of a replica, as the station of its leader sees them.

    Args:
        part: the leader's own.
        lines: to the followers.
        traffic: by which batches are sent; None: there are no followers.
        station: knows which A was sent, and which slot Δ goes to.
        told: whether a follower tells the loss of each micro-step, since the leader does not know it.
    """

    def __init__(
        self, part: OwnPart, lines: Sequence[Line], traffic: Traffic | None, station: LocalStation, *, told: bool
    ) -> None:
        self._part, self._lines, self._traffic, self._station, self._told = part, lines, traffic, station, told
        self._anew = False

    def adopt(self, state: State) -> None:
        del state  # each maps it by its place
        order = self._station.order
        say_all(self._lines, Adopt(order.place, order.version, self._station.attempt, self._anew))
        self._part.adopt(order.place, order.version, anew=self._anew)
        self._anew = False

    def advance(self, batch: Batch, clock: Clock) -> float:
        tensors = (batch.input, batch.target) if batch.samples else None
        if self._lines:
            say_all(self._lines, Advance(clock, batch.samples, map_tree(_form, tensors)))
            map_tree(self._send, tensors)
        loss = self._part.advance(batch, clock)
        if self._told and batch.samples:
            loss = float(self._lines[-1].answer("the loss of a micro-step"))
        return loss

    def finish(self, out: State) -> Measured:
        del out  # each writes into it what it has of Δ
        slot = self._station.order.slot
        say_all(self._lines, Finish(slot))
        said = [self._part.finish(slot), *(line.answer("its part of Δ") for line in self._lines)]
        measured = _measured(said)
        self._anew = not measured.finite
        return measured

    def _send(self, tensor: Tensor) -> Tensor:
        assert self._traffic is not None, "nobody is there"
        if tensor.numel():
            self._traffic.broadcast(_bytes(tensor.contiguous()), 0, "a batch")
        return tensor


def _measured(said: Sequence[Said]) -> Measured:
    """Of all parts of a Δ."""
    versions = {each.version for each in said}
    if len(versions) > 1:
        raise PacelineError(
            f"the parts of one replica read versions {sorted(versions)} of A for one Δ; this is a defect of paceline"
        )
    known = said[-1].loss  # the worker with the last stage knows it
    good = all(each.finite for each in said) and (not said[0].samples or math.isfinite(known))
    return Measured(known, said[0].samples, good)


class Follower:
    """Does what the leader says.

    Args:
        part: its own.
        line: to the leader.
        traffic: by which batches come.
        gauge: measures it.
        tells: whether it tells the loss of each micro-step.
    """

    def __init__(self, part: OwnPart, line: Line, traffic: Traffic, gauge: Gauge, *, tells: bool) -> None:
        self._part, self._line, self._traffic, self._gauge, self._tells = part, line, traffic, gauge, tells
        self.step: Clock = 0
        """Which Δ the replica is at."""

    def run(self) -> None:
        """Until the leader ends it."""
        while True:
            began = time.monotonic_ns()
            word = self._line.hear()
            if isinstance(word, End):
                return
            if isinstance(word, Adopt) and not self.step:
                self._gauge.start()
            else:
                self._gauge.waited(began, self.step)
            self._do(word)

    def _do(self, word: Adopt | Advance | Finish) -> None:
        began = time.monotonic_ns()
        if isinstance(word, Adopt):
            self.step = word.step
            self._part.adopt(word.place, word.version, anew=word.anew)
            self._gauge.spent("pull", began, self.step)
        elif isinstance(word, Advance):
            loss = self._part.advance(self._batch(word), word.clock)
            if self._tells and word.samples:
                self._line.say(loss)
            self._gauge.stepped(pushed=False)
        else:
            self._line.say(self._part.finish(word.slot))
            self._gauge.spent("push", began, self.step)

    def _batch(self, word: Advance) -> Batch:
        if not word.samples:
            return Batch(None, None, 0)
        inputs, targets = map_tree(self._receive, word.forms)
        return Batch(inputs, targets, word.samples)

    def _receive(self, form: Tensor) -> Tensor:
        made = torch.empty(form.shape, dtype=form.dtype)
        if made.numel():
            self._traffic.broadcast(_bytes(made), 0, "a batch")
        return made


def _form(tensor: Tensor) -> Tensor:
    """Its shape and its dtype, without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _bytes(tensor: Tensor) -> Tensor:
    """All of it as one vector: the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)
