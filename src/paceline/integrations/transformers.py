"""Hugging Face's Trainer: each replica is a Trainer alone in its process, whose optimizer's step is the run's.

::

    torchrun            this module                            transformers
    RANK, WORLD_SIZE -> hidden while arguments and Trainer --> one process: no DDP, all of its callbacks
                        are built
                        join(model, optimizer) --------------> train(): optimizer.step(), scheduler, logs, saves
                        A, on all replicas  <----------------- best model, on_train_end
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.api.join import join, strategy_of
from paceline.core.errors import InputError
from paceline.device import of_worker, resolved
from paceline.engine.worker import Worker
from paceline.integrations.joined import LOG, Rounds, stepping
from paceline.strategy import Strategy

try:
    import accelerate  # noqa: F401  # the Trainer's
    import transformers
except ImportError as error:
    raise ImportError(
        "paceline.integrations.transformers needs transformers and accelerate; pip install 'paceline[transformers]'"
    ) from error
if not hasattr(transformers.Trainer, "_finalize_training"):
    raise ImportError(
        f"paceline.integrations.transformers needs a Trainer that is divided as that of transformers 5, but this is "
        f"{transformers.__version__}; pip install --upgrade 'paceline[transformers]'"
    )

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
"""Files of a checkpoint, as the Trainer names them."""
_OPTIONS = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
            "persistent_workers", "in_order", "generator")  # fmt: skip
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Context manager: no launcher's environment, of which accelerate would make a process group and DDP."""
    before = {name: os.environ.pop(name) for name in _LAUNCH if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """``transformers.TrainingArguments`` of one replica; all of its options are there.

    Batch sizes are one replica's. Replica 0 alone logs and saves. For arguments of another class derive from both:
    ``class Arguments(TrainingArguments, trl.SFTConfig)``.
    """

    def __post_init__(self) -> None:
        self.replica = int(os.environ.get("RANK", "0"))
        with _alone():
            super().__post_init__()
            self.device  # noqa: B018  # accelerate finds out now that it is alone

    @property
    def should_log(self) -> bool:
        """Return whether this process writes logs."""
        return self.replica == 0 and super().should_log

    @property
    def should_save(self) -> bool:
        """Return whether this process writes files."""
        return self.replica == 0 and super().should_save


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` as a replica: under torchrun each rank is one; alone it is the Trainer that it was::

        from paceline.integrations.transformers import Trainer, TrainingArguments
        trainer = Trainer(model, TrainingArguments(...), train_dataset=data, strategy="replicas=4")
        trainer.train()

    Within ``train()`` the optimizer's step pushes Δ and pulls A. A pass over ``train_dataset`` is divided among the
    replicas, each of which evaluates on all of ``eval_dataset``. For another class of trainer derive from both:
    ``class Own(Trainer, trl.SFTTrainer)``.

    Args:
        args: positional arguments of ``transformers.Trainer``; its TrainingArguments are those of this module.
        strategy: of as many replicas as processes; None: synchronous ones.
        settings: keyword arguments of :func:`paceline.join`, a budget for instance.
        options: keyword arguments of ``transformers.Trainer``.

    Raises:
        InputError: something can't be done as written.
    """

    def __init__(
        self,
        *args: Any,
        strategy: Strategy | str | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        given = args[1] if len(args) > 1 else options.get("args")
        if given is None:
            options["args"] = given = TrainingArguments(output_dir="tmp_trainer")
            args = args[:1]
        if not isinstance(given, TrainingArguments):
            raise InputError(
                f"args are {type(given).__module__}.{type(given).__name__}, which make one DDP process of each rank; "
                "write from paceline.integrations.transformers import Trainer, TrainingArguments"
            )
        with _alone():
            super().__init__(*args, **options)
        self._strategy, self._settings = strategy_of(strategy), dict(settings or {})
        _refuse(self, of_worker(resolved(self._strategy.device), given.replica))
        self._worker: Worker | None = None
        """Within train()."""
        self._block = contextlib.ExitStack()
        self._told = False
        """Whether it was said that the optimizer's state is not saved."""

    # -------------------------------------------------------------------------------- replica 0 writes, all get batches

    def is_world_process_zero(self) -> bool:
        """Return whether this is replica 0: callbacks ask."""
        return bool(self.args.replica == 0)

    def is_local_process_zero(self) -> bool:
        """Return whether this is replica 0: progress bars ask."""
        return self.is_world_process_zero()

    def get_train_dataloader(self) -> Any:
        """Return the loader of this replica's batches; outside of ``train()`` that of all."""
        if self._single or self._worker is None:
            return super().get_train_dataloader()
        with torch.random.fork_rng(devices=[]):  # its sampler asks torch's generator, now the run's
            torch.set_rng_state(self._generator)
            loader = super().get_train_dataloader()
        rounds = Rounds(self._worker, _plain(loader))
        vars(rounds)["set_epoch"] = loader.set_epoch  # of the sampler
        return rounds

    @property
    def _single(self) -> bool:
        return self._worker is None or self._worker.replicas == 1

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.replica == 0:
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        except InputError as error:  # the optimizer's state is with A at a server
            if not self._told:
                LOG.warning("checkpoints are saved without the optimizer's state (%s)", error)
            self._told = True
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    # ------------------------------------------------------------------------------------------------- within the run

    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: str | None = None, **options: Any) -> Any:
        self.create_optimizer()
        # It writes new groups into it, so before the join.
        self.optimizer: Any = self.accelerator.prepare(self.optimizer)
        optimizer = self.optimizer.optimizer
        if resume_from_checkpoint is not None:
            self._load_optimizer(optimizer, resume_from_checkpoint)
        backward, self._generator = self.accelerator.backward, torch.get_rng_state()
        bound = self.args.max_grad_norm or None if self._strategy.workers > 1 else None  # else the Trainer clips
        with contextlib.ExitStack() as self._block:
            block = self._block
            self._worker = worker = block.enter_context(
                join(model=self.model, optimizer=optimizer, strategy=self._strategy, clip_norm=bound, **self._settings)
            )
            block.callback(self._leave, backward)
            block.enter_context(stepping(optimizer, self._end))
            self.accelerator.backward = lambda loss, **_: worker.backward(loss)
            return super()._inner_training_loop(*args, resume_from_checkpoint=resume_from_checkpoint, **options)

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._single:
            return super()._clip_grad_norm(model)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)  # of this replica, for the log; the run clips all of them

    def _leave(self, backward: Any) -> None:
        self._worker, self.accelerator.backward = None, backward

    def _end(self) -> None:
        """Let train() end: the budget is spent, and the step that it is at was not made."""
        self.control.should_training_stop = True
        self.state.global_step -= 1  # it counts that step

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        epochs, steps = super()._init_training_state(*args, **options)
        if steps and not self._single:
            raise InputError(
                f"the checkpoint is in the middle of a pass, after {steps} of its batches, which replicas can't skip; "
                "write TrainingArguments(ignore_data_skip=True), or save_strategy='epoch' next time"
            )
        return epochs, steps

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, checkpoint: str) -> None:
        """Load the optimizer's state, which the run goes on with."""
        path = os.path.join(checkpoint, OPTIMIZER)
        if os.path.isfile(path):
            optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        else:
            LOG.warning("%s has no state of the optimizer, which begins anew", checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:  # the optimizer's state is with A by now
            path = os.path.join(checkpoint, SCHEDULER)
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))

    def _finalize_training(self, trial: Any, *args: Any) -> Any:
        self._block.close()  # the model has A from here on, and all replicas have come: replica 0 has saved
        if self.state.best_global_step:
            best = os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.best_global_step}")
            self.state.best_model_checkpoint = best if os.path.isdir(best) else None
        return super()._finalize_training(trial, *args)


def _plain(loader: Any) -> Any:
    """Return torch's loader of accelerate's batches; that moves them to a device, as the Trainer does itself."""
    if isinstance(loader.dataset, IterableDataset):
        return loader
    options = {name: getattr(loader, name) for name in _OPTIONS}
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **options)


def _refuse(trainer: Trainer, device: torch.device) -> None:
    """Raise InputError where a Trainer's step is not its optimizer's, of one model on one device."""
    args = trainer.args
    for name, given, instead in (
        ("deepspeed", trainer.is_deepspeed_enabled, "shards the optimizer by itself; leave it out"),
        ("fsdp", trainer.is_fsdp_enabled, "shards the model by itself; leave it out"),
        ("fp16=True", getattr(trainer.accelerator, "scaler", None) is not None,
         "scales gradients, which would come to A scaled; write bf16=True"),
        ("auto_find_batch_size=True", args.auto_find_batch_size,
         "begins anew on one replica alone; write per_device_train_batch_size"),
        (f"n_gpu={args.n_gpu}", args.n_gpu > 1,
         "makes one replica of all GPUs (DataParallel); start each process with CUDA_VISIBLE_DEVICES of its own"),
        (f"world_size={args.world_size}", args.world_size > 1,
         "is DDP's, which was there before; build no Accelerator before TrainingArguments"),
    ):  # fmt: skip
        if given:
            raise InputError(f"a Trainer with {name} can't be a replica: it {instead}")
    if (args.device.type, args.device.index or 0) != (device.type, device.index or 0):
        raise InputError(
            f"the Trainer computes on {args.device}, and the strategy on {device}; write "
            f"device={args.device.type} in the strategy, or TrainingArguments(use_cpu=True)"
        )
