"""Bounds of all frames of a batch at once, whatever their options: by these they are looked at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.plan.searching.bounds import Bounds, Real
from paceline.plan.searching.candidates import Frames, Unlike, Whole
from paceline.plan.searching.sums import Sums


@dataclass(frozen=True)
class Rows:
    """Bounds of all frames of one batch, whatever their options."""

    bounds: Bounds
    frames: Frames
    most_chunks: int
    divides: bool
    """Whether replicas may divide what they have among them."""
    streams: bool
    """Whether the pipeline of one replica may go on from step to step."""

    @cached_property
    def workers(self) -> Whole:
        """Of each."""
        own = self.frames.shards * self.frames.stages
        own[self.frames.alike :] = self._of_unlike(lambda one: one.workers)
        found: Whole = self.frames.replicas * own
        return found

    def _of_unlike(self, of: Callable[[Unlike], int]) -> Whole:
        """Of the last frames, whose stages differ."""
        found: Whole = np.array([of(one) for one in self.frames.unlike], dtype=np.int64)[self.frames.which]
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
        found: Real = m * busiest + bubble + self._messages_s()
        if self.streams:
            found = np.where((self.frames.replicas == 1) & (self.frames.shards == 1), m * busiest, found)
        found += self._update_s() + habits.micro_batch_s * m
        if len(self.frames.which):
            found[self.frames.alike :] = self._unlike_s(all_s)
        return found + habits.step_s

    def _update_s(self) -> Real:
        """Divided among replicas as far as it may be; Δs of micro-batches that are added only where they may be."""
        frames, numerics = self.frames, self.bounds.workload.numerics
        among = frames.replicas if self.divides else np.ones_like(frames.stages)
        added = self.bounds.habits.added_moves * numerics.gradient * (frames.micro_batches - 1)
        added = added / np.where((frames.stages == 1) & (frames.shards == 1), among, 1)
        moved = (2 * numerics.total / among + added) * self._each(lambda sums: sums.parameters) / frames.stages
        found: Real = moved / self.bounds.cluster.device.memory_bytes_per_s
        return found

    def _unlike_s(self, all_s: Real) -> Real:
        """Where some take turns, all columns count rather than the stages; where shards differ all workers, each layer
        with that of their numbers with which it takes least."""
        frames, first = self.frames, self.frames.alike
        m, size = frames.micro_batches[first:], frames.micro_batch[first:]
        columns, most = self._of_unlike(lambda one: sum(one.copies)), self._of_unlike(lambda one: max(one.copies))
        turning = all_s[first:] * (1 + (m - most) / columns) + self._messages_s()[first:]
        sets = list(dict.fromkeys(frozenset(one.shards) for one in frames.unlike))
        of_set = self._of_unlike(lambda one: sets.index(frozenset(one.shards)))
        sizes, of_size = np.unique(size, return_inverse=True)
        least = np.array([[self.bounds.least_s(int(b), each) for each in sets] for b in sizes])
        divided = m * least[of_size.reshape(-1), of_set] / self._of_unlike(lambda one: one.workers)
        found: Real = np.where(self._of_unlike(lambda one: len(set(one.shards))) == 1, turning, divided)
        return found

    def _messages_s(self) -> Real:
        which, pairs = self._pairs
        p, seen = self.frames.stages, 2 * self.frames.micro_batches * (1 - self.bounds.habits.send_overlap)
        each = self.bounds.cluster.devices_per_host
        inside = np.array([self.bounds.message_s(b, t, max(1, each // t)) for b, t in pairs])[which]
        between = np.array([self.bounds.message_s(b, t, each // t + 1) for b, t in pairs])[which]
        one = np.where(p * self.frames.shards <= each, np.minimum(inside, between), between)
        hops = np.minimum(2 * (p - 1) + seen, 2 * (p - 1) * self.frames.micro_batches)
        found: Real = np.where(p > 1, hops * one, 0.0)
        return found

    @cached_property
    def held_bytes(self) -> Real:
        """At the least, by the worker that holds most: states, divided as far as can be."""
        numerics, p = self.bounds.workload.numerics, self.frames.stages
        replicas = self._among() if self.divides else np.ones_like(p)
        whole = (p == 1) & (self.frames.shards == 1)
        states = numerics.parameter + numerics.gradient + numerics.optimizer / replicas
        states = np.where(whole, numerics.total / replicas, states)
        alike = self._most_alike * self._each(lambda sums: sums.alike.parameters)
        own = np.maximum(self._each(lambda sums: sums.parameters) / p, alike)
        shards = self._of_unlike(lambda one: sum(one.shards))
        own[self.frames.alike :] = np.maximum(own[self.frames.alike :], self.bounds.sums(1, 1).parameters / shards)
        found: Real = own * states + self.bounds.habits.context_bytes
        return found

    def _among(self) -> Whole:
        """Workers that may have the same part of A, at the most."""
        found: Whole = self.frames.replicas.copy()
        found[self.frames.alike :] *= self._of_unlike(lambda one: max(one.copies))
        return found
