"""Lightning's Trainer: each replica is a Trainer of its own, whose strategy makes the optimizer's step the run's.

::

    Lightning                                this module
    setup, restore, sanity check             SingleDeviceStrategy's
    training loader            ------------> join(module, optimizer); this replica's batches
    optimizer.step(closure)    ------------> closure(), push Δ, pull A
    on_train_end, on_exception ------------> end of the run: the module has A
"""

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from paceline.api.join import join, strategy_of
from paceline.core.errors import InputError
from paceline.device import of_worker, resolved
from paceline.engine.worker import Worker
from paceline.integrations.joined import LOG, Rounds, stepping
from paceline.strategy import Strategy

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ImportError("paceline.integrations.lightning needs lightning; pip install 'paceline[lightning]'") from error


class PacelineStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """A strategy of Lightning's Trainer: under torchrun each rank is a replica; alone it is one device::

        from paceline.integrations.lightning import PacelineStrategy
        trainer = lightning.Trainer(strategy=PacelineStrategy("replicas=4 aggregation=asynchronous"))

    From the training loader on until ``on_train_end`` the optimizer's step pushes Δ and pulls A, and a pass over the
    training loader is divided among the replicas. Each validates on all of its data. Replica 0 alone logs and saves.

    Args:
        strategy: of as many replicas as processes, with ``device=cuda`` where Lightning's accelerator is a GPU; None:
            synchronous ones.
        settings: keyword arguments of :func:`paceline.join`, a budget for instance.

    Raises:
        InputError: from ``fit``: something can't be done as written.
    """

    strategy_name = "paceline"

    def __init__(self, strategy: Strategy | str | None = None, **settings: Any) -> None:
        self.replica = int(os.environ.get("RANK", "0"))
        self._strategy, self._settings = strategy_of(strategy), settings
        super().__init__(of_worker(resolved(self._strategy.device), self.replica))
        self._block = contextlib.ExitStack()
        self._told = False
        """Whether it was said that the optimizer's state is not saved."""
        self._worker: Worker | None = None
        """While fit trains."""

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is replica 0, which saves."""
        return self.replica == 0

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader of this replica's batches, if it is for training."""
        if not self.lightning_module.trainer.training:
            return dataloader
        if self._worker is None:
            self._worker = self._join()
        return dataloader if self._worker.replicas == 1 else Rounds(self._worker, dataloader)

    def _join(self) -> Worker:
        module, trainer = self.lightning_module, self.lightning_module.trainer
        if len(self.optimizers) != 1:
            raise InputError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, but a replica of Lightning has one; "
                "write paceline.launch(loop, Program(optimizer={…})), whose worker has several"
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise InputError(
                "precision='16-mixed' scales gradients, which would come to A scaled; write precision='bf16-mixed'"
            )
        (optimizer,) = self.optimizers
        bound = trainer.gradient_clip_val or None if self._strategy.workers > 1 else None  # else Lightning clips
        if bound is not None and trainer.gradient_clip_algorithm == "value":
            raise InputError(
                "gradient_clip_algorithm='value' is of one replica's gradients, not of an update's; write 'norm'"
            )
        for each in module.modules():  # torchmetrics' would add up over the run's process group
            if hasattr(each, "distributed_available_fn"):
                each.distributed_available_fn = _alone
        with contextlib.ExitStack() as block:
            if bound is not None:  # the run clips, by the norm of all gradients of an update
                block.callback(setattr, trainer, "gradient_clip_val", trainer.gradient_clip_val)
                trainer.gradient_clip_val = None
            worker = block.enter_context(
                join(model=module, optimizer=optimizer, strategy=self._strategy, clip_norm=bound, **self._settings)
            )
            block.enter_context(stepping(optimizer, lambda: setattr(trainer, "should_stop", True)))
            self._block = block.pop_all()
        return worker

    def on_train_end(self) -> None:
        """End the run: the module has A from here on."""
        self._leave(None)

    def on_exception(self, exception: BaseException) -> None:
        """End the run with an error."""
        self._leave(exception)

    def teardown(self) -> None:
        """End the run, if it has not ended."""
        self._leave(None)
        super().teardown()

    def _leave(self, error: BaseException | None) -> None:
        block, self._block, self._worker = self._block, contextlib.ExitStack(), None
        block.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state; nothing where that is with A at a server."""
        try:
            return dict(super().optimizer_state(optimizer))
        except InputError as error:
            if self.is_global_zero and not self._told:
                LOG.warning("checkpoints are saved without the optimizer's state (%s)", error)
            self._told = True
            return {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state, which the run goes on with, if the checkpoint has it."""
        if all(checkpoint["optimizer_states"]):
            super().load_optimizer_state_dict(checkpoint)
        else:
            LOG.warning("the checkpoint has no state of the optimizer, which begins anew")


def _alone() -> bool:
    """Return that metrics are one replica's."""
    return False
