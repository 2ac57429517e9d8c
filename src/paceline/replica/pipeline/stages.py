"""The parts that one worker holds, made ready for work."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import Tensor

from paceline.program import Program
from paceline.replica.capture import Captured
from paceline.replica.pipeline.base import Part
from paceline.replica.pipeline.batchnorm import Deferred
from paceline.replica.pipeline.copies import Copies
from paceline.replica.pipeline.forward import Means
from paceline.replica.pipeline.pieces import Body, Pieces, Whole
from paceline.replica.pipeline.split_backward import Splitter
from paceline.replica.pipeline.stage import Stage
from paceline.replica.pipeline.substitutes import Substitutes, substitute
from paceline.replica.saved import Holdings
from paceline.replica.state import Layout

Recompute: TypeAlias = Literal["none", "boundaries", "all"]
Batchnorm: TypeAlias = Literal["micro-batch", "mini-batch"]


class Workshop:
    """Makes stages of parts.

    Args:
        program: says seed, precision and loss.
        captured: knows the model's output.
        last: the number of the last part.
        device: as torch writes it.
        layout: of the worker's tensors.
        recompute: see :class:`~paceline.replica.pipeline.stage.Stage`.
        batchnorm: whose statistics running ones are made of.
        splits: whether gradients of weights are put off.
        holdings: is told what is kept.
        copies: who take turns at the worker's stage; None: nobody else does.
    """

    def __init__(
        self,
        program: Program,
        captured: Captured,
        last: int,
        device: str,
        layout: Layout,
        *,
        recompute: Recompute,
        batchnorm: Batchnorm,
        splits: bool,
        holdings: Holdings,
        copies: Copies | None = None,
    ) -> None:
        self._program, self._captured, self._last, self._device = program, captured, last, device
        self._recompute, self._batchnorm, self._splits = recompute, batchnorm, splits
        self._running = {entry.name for block in layout.buffers for entry in block.entries}
        self._holdings, self._copies = holdings, copies

    def stage(self, part: Part) -> Stage:
        """One part, at work; its module is changed in place."""
        buffers = {name: buffer for name, buffer in part.module.named_buffers() if name in self._running}
        rebuild = self._captured.rebuild if part.number == self._last else None
        running = list(buffers.values())
        body = self._body(part, running)
        splitter, deferred = self._splitter(body), self._deferred(body, buffers)
        if isinstance(body, Pieces) and splitter is not None:
            body.again = splitter.as_now
        means = Means(body, self._program, rebuild, self._device, splitter, deferred)
        forgets = self._recompute == "boundaries"
        return Stage(part, means, forgets=forgets, running=running, holdings=self._holdings)

    def _body(self, part: Part, running: Sequence[Tensor]) -> Body:
        return Pieces(part, self._captured, running) if self._recompute == "all" else Whole(part)

    def _splitter(self, body: Body) -> Splitter | None:
        if not self._splits:
            return None
        splitter = Splitter(self._device)
        return splitter if _substitute(body, splitter.substitutes) else None

    def _deferred(self, body: Body, buffers: dict[str, Tensor]) -> Deferred | None:
        if self._batchnorm != "mini-batch":
            return None
        counters = [buffer for name, buffer in buffers.items() if name.endswith("num_batches_tracked")]
        deferred = Deferred(counters, self._copies)
        return deferred if _substitute(body, deferred.substitutes) else None


def _substitute(body: Body, substitutes: Substitutes) -> bool:
    found = [substitute(module, substitutes) for module in body.modules]
    return any(found)


def make_stages(workshop: Workshop, parts: Sequence[Part]) -> dict[int, Stage]:
    """By number."""
    return {part.number: workshop.stage(part) for part in parts}
