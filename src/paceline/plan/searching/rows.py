"""Bounds of all frames of a batch at once, whatever their options: by these they are looked at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.plan.searching.bounds import Bounds, Real
from paceline.plan.searching.candidates import Frames, Whole
from paceline.plan.searching.sums import Sums


@dataclass(frozen=True)
class Rows:
    """Bounds of all frames of one batch, whatever their options."""

    bounds: Bounds
    frames: Frames
    most_chunks: int
    divides: bool
    """Whether replicas may divide what they have among them."""

    @cached_property
    def workers(self) -> Whole:
        """Of each."""
        own = self.frames.stages.copy()
        if self.frames.copies:
            own[-len(self.frames.copies) :] = [sum(copies) for copies in self.frames.copies]
        found: Whole = self.frames.replicas * self.frames.shards * own
        return found

    @cached_property
    def by_step(self) -> Whole:
        """Places, the quickest first."""
        found: Whole = np.argsort(self.step_s, kind="stable")
        return found

    @cached_property
    def by_held(self) -> Whole:
        """Places, the smallest first."""
        found: Whole = np.argsort(self.held_bytes, kind="stable")
        return found

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int64], Sequence[tuple[int, int]]]:
        """Which pair of b and t each frame has, and the pairs."""
        most = int(self.frames.shards.max(initial=0)) + 1
        different, which = np.unique(self.frames.micro_batch * most + self.frames.shards, return_inverse=True)
        return which, [divmod(int(each), most) for each in different]

    def _each(self, of: Callable[[Sums], float]) -> Real:
        which, pairs = self._pairs
        found: Real = np.array([float(of(self.bounds.sums(b, t))) for b, t in pairs])[which]
        return found

    @cached_property
    def _most_alike(self) -> Real:
        """Layers that are the same, of which some stage has so many at least."""
        found: Real = np.ceil(self._each(lambda sums: sums.alike.many) / self.frames.stages)
        return found

    @cached_property
    def step_s(self) -> Real:
        """At the least."""
        m, p, habits = self.frames.micro_batches, self.frames.stages, self.bounds.habits
        all_s = self._each(lambda sums: sums.seconds)
        busiest = np.maximum(all_s / p, self._each(lambda sums: sums.longest))
        busiest = np.maximum(busiest, self._most_alike * self._each(lambda sums: sums.alike.seconds))
        rest: Real = np.maximum(0.0, all_s - busiest) / self.most_chunks
        gaps: Real = np.maximum(0.0, self._each(lambda sums: sums.gaps) - busiest)
        bubble: Real = np.minimum(rest, np.where(self.frames.shards == 1, gaps, rest))
        found: Real = m * busiest + bubble
        self._take_turns(found, all_s)
        return found + self._messages_s() + habits.step_s + habits.micro_batch_s * m

    def _take_turns(self, found: Real, all_s: Real) -> None:
        """Where some take turns at a stage."""
        if self.frames.copies:
            last = slice(-len(self.frames.copies), None)
            many = np.array([(sum(copies), max(copies)) for copies in self.frames.copies])
            found[last] = all_s[last] * (1 + (self.frames.micro_batches[last] - many[:, 1]) / many[:, 0])

    def _messages_s(self) -> Real:
        which, pairs = self._pairs
        p, seen = self.frames.stages, 2 * self.frames.micro_batches * (1 - self.bounds.habits.send_overlap)
        each = self.bounds.cluster.devices_per_host
        inside = np.array([self.bounds.message_s(b, t, max(1, each // t)) for b, t in pairs])[which]
        between = np.array([self.bounds.message_s(b, t, each // t + 1) for b, t in pairs])[which]
        one = np.where(p * self.frames.shards <= each, np.minimum(inside, between), between)
        found: Real = np.where(p > 1, (2 * (p - 1) + seen) * one, 0.0)
        return found

    @cached_property
    def held_bytes(self) -> Real:
        """At the least, by the worker that holds most: states, divided as far as can be."""
        numerics, p = self.bounds.workload.numerics, self.frames.stages
        replicas = self.frames.replicas if self.divides else np.ones_like(p)
        whole = (p == 1) & (self.frames.shards == 1)
        states = numerics.parameter + numerics.gradient + numerics.optimizer / replicas
        states = np.where(whole, numerics.total / replicas, states)
        alike = self._most_alike * self._each(lambda sums: sums.alike.parameters)
        own = np.maximum(self._each(lambda sums: sums.parameters) / p, alike)
        found: Real = own * states + self.bounds.habits.context_bytes
        return found
