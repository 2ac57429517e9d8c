"""Parameters that a replica keeps from Δ to Δ, and how they and A meet: local SGD, DiLoCo, elastic averaging.

With fragments and an overlap, as in Streaming DiLoCo (arXiv 2501.18512)::

    own steps    ... 15  16 | 17  18  19 ...
                          \\        /
    the fragment           sum .. A            x is mixed with A two steps later: overlap=2
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.delta import Adopt, Change, Delta, Keep, Mix, Rebase
from paceline.replica.flat_state import FlatLayout, FlatState, fragment_slices


def nothing() -> None:
    """Do nothing."""


@dataclass
class Exchange:
    """How the parameters of a replica and A meet.

    Args:
        rule: what x becomes when A is sent: A itself, a mixture, x as it was, or A and what x has moved since.
        fragments: slices of A's vectors that are exchanged in turn; empty: all of A is at once.
        overlap: own steps that are made before x takes over the A that was sent.
        ready: returns once what was sent may be read.
    """

    rule: Adopt
    fragments: Sequence[Sequence[slice]] = ()
    overlap: int = 0
    ready: Callable[[], None] = nothing

    @classmethod
    def of(cls, delta: Delta, rule: Adopt, whole: FlatLayout, layout: FlatLayout) -> "Exchange":
        """Return that of a kind of Δ.

        Args:
            delta: the kind.
            rule: as above.
            whole: layout of A.
            layout: of A, or of the part of it that the replica's worker has.
        """
        overlap = delta.overlap if isinstance(delta, Change) else 0
        return cls(rule, fragments_of(delta, whole, layout), overlap)


def fragments_of(delta: Delta, whole: FlatLayout, layout: FlatLayout) -> list[list[slice]]:
    """Return the slices of a layout's vectors that are exchanged in turn; none where all are at once."""
    if not isinstance(delta, Change) or delta.fragments == 1:
        return []
    return fragment_slices(whole, layout, delta.fragments)


class OwnParameters:
    """Parameters x, and the A that they have taken over last.

    Args:
        state: A, the first x.
        exchange: how they meet from then on.
    """

    def __init__(self, state: FlatState, exchange: Exchange) -> None:
        exchange.ready()
        self.state, self._read, self._exchange = state.clone(), state.clone(), exchange
        self.version = state.version
        """Of that A."""
        self._sent: FlatState | None = None
        """An A that was sent since."""
        self._steps_left = 0
        """Own steps to be made before it is taken over."""

    def send(self, state: FlatState) -> None:
        """Take over this A, at once or after some own steps."""
        self._sent, self._steps_left = state, self._exchange.overlap
        if not self._steps_left:
            self.take_over()

    @classmethod
    def restored(cls, kept: FlatState, saved: Mapping[str, Any], exchange: Exchange) -> "OwnParameters":
        """Return those that go on with what :meth:`kept` returned.

        Args:
            kept: as above.
            saved: ``version`` of the A that they had taken over; ``anew``: true if the A that is sent next may be
                another than it would have been, and have all that they have moved.
            exchange: how they and A meet.
        """
        own = cls(kept, exchange)
        own.version = saved.get("version", 0)
        if isinstance(exchange.rule, Rebase) and not saved.get("anew"):
            for vector in own._read.parameters:
                vector.zero_()
        return own

    def kept(self) -> FlatState:
        """Return what is to be kept between two Δs: x; or how far it has moved, where that is added to the next A."""
        if not isinstance(self._exchange.rule, Rebase):
            return self.state
        moved = self.state.clone()
        torch._foreach_sub_(moved.parameters, self._read.parameters)
        return moved

    @property
    def behind(self) -> bool:
        """Whether an A was sent that is not taken over."""
        return self._sent is not None

    def due(self) -> bool:
        """Return whether an A that was sent is to be taken over before the next step, and count the step if not."""
        if self._sent is not None and self._steps_left:
            self._steps_left -= 1
            return False
        return self._sent is not None

    def take_over(self) -> None:
        """Move x towards the A that was sent, where that has changed since the last one; do nothing if none was."""
        if self._sent is None:
            return
        (sent, self._sent), own, exchange = (self._sent, None), self.state, self._exchange
        exchange.ready()
        count = len(exchange.fragments)
        if isinstance(exchange.rule, Rebase):
            with torch.no_grad():
                for vector, read, source in zip(own.parameters, self._read.parameters, sent.parameters, strict=True):
                    vector.sub_(read).add_(source)
        elif not count:
            mix(own.parameters, sent.parameters, exchange.rule)
        for version in range(max(self.version, sent.version - count), sent.version) if count else ():
            slices = exchange.fragments[version % count]
            mix(_cut(own.parameters, slices), _cut(sent.parameters, slices), exchange.rule)
        if not isinstance(exchange.rule, Keep):
            for vector, source in zip(own.buffers, sent.buffers, strict=True):
                vector.copy_(source)
        # A Δ of a fragment, or of steps that were made before A was taken over, is counted from A itself.
        self._read.copy_(sent if count or exchange.overlap else own)
        self.version = sent.version

    def subtract_read(self, out: FlatState) -> None:
        """Make of a copy of x in ``out`` how far it has moved from A, in the fragment that is exchanged next."""
        if out.parameters:
            torch._foreach_sub_(out.parameters, self._read.parameters)
        fragments = self._exchange.fragments
        if fragments:
            for vector, own in zip(out.parameters, fragments[self.version % len(fragments)], strict=True):
                vector[: own.start].zero_()
                vector[own.stop :].zero_()


def mix(own: Sequence[Tensor], sent: Sequence[Tensor], rule: Adopt) -> None:
    """Move vectors of x towards those of the A that was sent, as the rule says."""
    if isinstance(rule, Keep):
        return
    alpha = rule.alpha if isinstance(rule, Mix) else 1.0
    with torch.no_grad():
        for vector, source in zip(own, sent, strict=True):
            if alpha == 1.0:  # exact, where x + (A - x) rounds
                vector.copy_(source)
            else:
                vector.add_(source - vector, alpha=alpha)


def _cut(vectors: Sequence[Tensor], slices: Sequence[slice]) -> list[Tensor]:
    return [vector[each] for vector, each in zip(vectors, slices, strict=True)]
