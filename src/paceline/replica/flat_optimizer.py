"""An optimizer that steps on a state: on its flat vectors, one for each dtype, where that gives the same bits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.base import OPTIMIZER, TensorChunk, slot_name
from paceline.checkpoint.reader import TensorSource
from paceline.checkpoint.scalars import is_scalar, scalar_of_json, scalar_to_json, scalars_to_json
from paceline.core.errors import PacelineError
from paceline.optim.lbfgs import LossOptimizer
from paceline.program import leaves
from paceline.replica.flat_state import FlatState, TensorEntry
from paceline.replica.optimizer_factory import OptimizerFactory, build_optimizer, steps_on_vectors
from paceline.replica.optimizer_kernels import StepKernel, has_hooks, kernel_of
from paceline.replica.optimizer_state import (
    Describe,
    describe_whole,
    groups_to_json,
    restore_groups,
    restore_scheduler,
    scheduler_to_json,
    slots_of,
)
from paceline.replica.step_options import OptionsCodec


class FlatOptimizer:
    """Steps a state by gradients.

    Args:
        make: the optimizer.
        schedule: its scheduler, stepped with it.
        state: the parameters; only its storage is used.
        gradient: of the same layout; gradients have to be written here, unless :attr:`has_kernel`.
    """

    def __init__(
        self,
        make: OptimizerFactory,
        schedule: Callable[[Any], LRScheduler] | None,
        state: FlatState,
        gradient: FlatState,
    ) -> None:
        self.state = state
        """The parameters."""
        self._flat = False
        """True if the optimizer steps on whole vectors, else on their tensors."""
        self._parameters = self._new_parameters(gradient)
        self._optimizer = build_optimizer(make, self._parameters)
        if steps_on_vectors(self._optimizer, len(self._parameters)):
            self._flat = True
            self._optimizer.param_groups[0]["params"] = self._parameters = self._new_parameters(gradient)
        self.adaptive = isinstance(self._optimizer, torch.optim.Adam)
        """True if steps are divided by second moments: :meth:`second_moments`."""

        self.options = OptionsCodec.of(self._optimizer)
        """Places of its options in what an own loop's optimizer says."""
        self._kernel = kernel_of(self._optimizer, state.parameters)
        self._scheduler = schedule(self._optimizer) if schedule else None
        if has_hooks(self._optimizer):  # the scheduler may have added one
            self._kernel = None
        self.has_kernel = self._kernel is not None
        """True if a kernel makes the steps: gradients may be anywhere, and a step may be made in slices."""
        if self.has_kernel:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # else the scheduler warns of no step
        group = self._optimizer.param_groups[0]
        self.state_count = self._kernel.from_group(group, 1, 1.0).state_count if self._kernel is not None else 0
        """Vectors of optimizer state for each vector of A, where a kernel makes the steps."""
        self.state_vectors = [[torch.zeros_like(v) for _ in range(self.state_count)] for v in state.parameters]
        self.steps = 0
        """Steps made."""

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizer's state."""
        # torch.optim's state is empty where a kernel makes the steps, and the other way round.
        return sum(tensor.nbytes for tensor in leaves([list(self._optimizer.state.values()), self.state_vectors]))

    @property
    def on_losses(self) -> LossOptimizer | None:
        """The optimizer, if its steps take the loss, too."""
        return self._optimizer if isinstance(self._optimizer, LossOptimizer) else None

    def finish(self, out: FlatState) -> None:
        """Move to the best state that an optimizer on losses knows; ``out`` receives it."""
        torch._foreach_copy_(out.vectors, self.state.vectors)
        self.point_at(out)
        if self.on_losses is not None:
            self.on_losses.finish()

    def take_options(self, vector: Tensor) -> None:
        """Have the options of an own loop's optimizer, and step those parts that it stepped."""
        self.options.write_to(self._optimizer, vector, options=self._scheduler is None)

    def options_after(self, before: Tensor, mean: Tensor) -> Tensor:
        """Return the options as they are, and the updates of each part, after an update of these options.

        Args:
            before: of A before it.
            mean: of its Δs.
        """
        return self.options.updated(self._optimizer, before, mean)

    def second_moments(self) -> Iterator[tuple[Tensor, float, dict[str, Any]]]:
        """Yield (v, steps made, options of its group) of Adam and AdamW, for each vector or for each tensor.

        Nothing is yielded before the first step, nor under other optimizers.
        """
        if not self.adaptive:
            return
        if self._kernel is not None:
            if self.steps:
                yield from ((v[1], self.steps, self._optimizer.param_groups[0]) for v in self.state_vectors)
            return
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for parameter in self._parameters:
            if state := self._optimizer.state.get(parameter):
                v = state.get("max_exp_avg_sq", state["exp_avg_sq"])
                yield v, float(state["step"]), groups[id(parameter)]

    def point_at(self, state: FlatState) -> None:
        """Step on this state's storage from now on."""
        self.state = state
        for parameter, tensor in zip(self._parameters, self._tensors(state), strict=True):
            parameter.data = tensor

    def kernel(self, rate: float = 1.0) -> StepKernel:
        """Return the kernel of the next step, which counts as made; the caller runs it and calls :meth:`end_step`."""
        assert self._kernel is not None, "no kernel makes this optimizer's steps"
        self.steps += 1
        kernel = self._kernel.from_group(self._optimizer.param_groups[0], self.steps, rate)
        if kernel.state_count > self.state_count:
            raise PacelineError(
                f"momentum was 0 when training began and is above that at step {self.steps}, so it has no memory; "
                "write a momentum above 0 from the start, as torch.optim.SGD(parameters, lr=…, momentum=1e-9)"
            )
        return kernel

    def step(
        self,
        gradients: Sequence[Tensor],
        rate: float = 1.0,
        out: FlatState | None = None,
        weight: float = 1.0,
        slices: Sequence[slice] | None = None,
        *,
        consumes: bool = False,
        loss: float | None = None,
    ) -> None:
        """Make one step with learning rate · ``rate``.

        Args:
            gradients: one vector for each dtype.
            rate: factor of the learning rate.
            out: receives the new parameters, and is stepped from then on; None: they are stepped in place.
            weight: factor of the gradients; other than 1 only if :attr:`has_kernel`.
            slices: of each vector, that the step is made on, only if :attr:`has_kernel`; None: it is made on all.
            consumes: whether the gradients may be overwritten, so that a step takes no memory of their size.
            loss: of the gradients, where :attr:`on_losses`.
        """
        after = out or self.state
        assert slices is None or self.has_kernel, "torch.optim steps on whole vectors"
        if self._kernel is None:
            self.steps += 1
            if after is not self.state:
                torch._foreach_copy_(after.parameters, self.state.parameters)
                self.point_at(after)
            # Undone after the step: schedulers compute the next learning rate from the present one.
            rates = [group["lr"] for group in self._optimizer.param_groups]
            for group, lr in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = lr * rate
            if self.on_losses is not None:
                self.on_losses.loss = loss
            self._optimizer.step()
            for group, lr in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = lr
        else:
            kernel = self.kernel(rate)  # reads the group at each step, since schedulers write it
            vectors = [*zip(self.state.parameters, after.parameters, gradients, self.state_vectors, strict=True)]
            if slices is not None:
                if after is not self.state:
                    torch._foreach_copy_(after.parameters, self.state.parameters)
                each = zip(vectors, slices, strict=True)
                vectors = [(b[s], a[s], g[s], [v[s] for v in vs]) for (b, a, g, vs), s in each]
            for before, new, gradient, state in vectors:
                kernel.step(before, new, gradient, state, weight, consumes=consumes)
        self.end_step(after)

    def step_by_tensor(self, gradients: Sequence[Tensor], rate: float = 1.0, weight: float = 1.0) -> None:
        """Make one step in place on a gradient for each tensor; only if :attr:`has_kernel`."""
        kernel, remaining = self.kernel(rate), iter(gradients)
        for block, vector, state in zip(
            self.state.layout.parameters, self.state.parameters, self.state_vectors, strict=True
        ):
            for entry in block.entries:
                part = vector[entry.start : entry.stop]
                part_of_state = [v[entry.start : entry.stop] for v in state]
                kernel.step(part, part, next(remaining).reshape(-1), part_of_state, weight)
        self.end_step(self.state)

    def replicated(self) -> dict[str, Any]:
        """Return all that steps change but the parameters, for :meth:`replicate` in another process."""
        optimizer = self._optimizer
        return {
            "steps": self.steps,
            "vectors": self.state_vectors,
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            "state": [dict(optimizer.state[p]) if p in optimizer.state else None for p in self._parameters],
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
        }

    def replicate(self, other: Mapping[str, Any]) -> None:
        """Go on where another process's optimizer of the same parameters is, which has :meth:`replicated` itself."""
        self.steps = other["steps"]
        for own, vectors in zip(self.state_vectors, other["vectors"], strict=True):
            for vector, value in zip(own, vectors, strict=True):
                vector.copy_(value)
        for group, options in zip(self._optimizer.param_groups, other["groups"], strict=True):
            group.update(options)
        for parameter, state in zip(self._parameters, other["state"], strict=True):
            if state is not None:  # its tensors may lie in memory that can't be written
                copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
                self._optimizer.state[parameter] = copies
        if self._scheduler is not None:
            self._scheduler.load_state_dict(other["scheduler"])

    def chunks(self, describe: Describe = describe_whole) -> list[TensorChunk]:
        """Return the tensors of the optimizer's state, by full parameter name; none before the first step.

        Args:
            describe: returns the chunks of a tensor that belongs to one of the layout's parameters.
        """
        found: list[TensorChunk] = []
        for parameter, entries in self._owned():
            for slot, value in self._tensors_of(parameter).items():
                if value.shape != parameter.shape:  # it is no part of a tensor: all of it, from who has the parameter
                    names = self._names(parameter, entries, describe)
                    found += [TensorChunk.whole(slot_name(slot, name), value) for name in names]
                    continue
                for entry, part in zip(entries, self._parts(entries, value), strict=True):
                    found += describe(f"{OPTIMIZER}{slot}/", entry, part)
        return found

    def states(self) -> list[dict[str, Any]]:
        """Return copies of the state of each tensor of the layout, as torch's optimizer of the same class has it."""
        found = list[dict[str, Any]]()
        for parameter, entries in self._owned():
            own = self._optimizer.state.get(parameter, {})
            shared = {slot: value for slot, value in own.items() if is_scalar(value)}
            if self.has_kernel and self.adaptive and self.steps:
                shared["step"] = torch.tensor(float(self.steps))
            tensors = {slot: self._parts(entries, value) for slot, value in self._tensors_of(parameter).items()}
            for i in range(len(entries)):
                found.append(deepcopy(shared) | {slot: parts[i].clone() for slot, parts in tensors.items()})
        return found

    def state_json(self, describe: Describe = describe_whole) -> dict[str, Any]:
        """Return what of the optimizer's state is no vector.

        Args:
            describe: as for :meth:`chunks`.

        Raises:
            InputError: it is neither a tensor nor a number.
        """
        scalars: dict[str, dict[str, Any]] = {}
        names = {id(parameter): self._names(parameter, entries, describe) for parameter, entries in self._owned()}
        for parameter, _ in self._owned():
            for slot, value in self._optimizer.state.get(parameter, {}).items():
                if is_scalar(value):
                    scalars.setdefault(slot, {}).update(dict.fromkeys(names[id(parameter)], value))
        every = [name for each in names.values() for name in each]
        as_json = {slot: scalars_to_json(by_name, every) for slot, by_name in scalars.items() if by_name}
        if self.has_kernel and self.adaptive and self.steps:
            as_json["step"] = {"all": scalar_to_json(torch.tensor(float(self.steps)))}
        return {
            "class": type(self._optimizer).__qualname__,
            "steps": self.steps,
            "scalars": as_json,
            "groups": groups_to_json(self._optimizer),
            "parameters": [
                [name for parameter in group["params"] for name in names.get(id(parameter), ())]
                for group in self._optimizer.param_groups
            ],
            "scheduler": scheduler_to_json(self._scheduler),
        }

    def restore(
        self,
        saved: Mapping[str, Any],
        checkpoint: TensorSource,
        describe: Describe = describe_whole,
        *,
        options: bool = True,
    ) -> None:
        """Go on from a checkpoint; an optimizer of another class begins anew, but for its scheduler.

        Args:
            saved: what :meth:`state_json` returned.
            checkpoint: has the tensors.
            describe: as for :meth:`chunks`.
            options: whether the groups' options (learning rate, momentum, ...) become those of the checkpoint.

        Raises:
            InputError: the checkpoint lacks a tensor, or has it in another shape or dtype.
        """
        if saved["class"] == type(self._optimizer).__qualname__:
            self.steps = saved["steps"]
            if self._kernel is None:
                self._create_state(saved["scalars"], checkpoint, describe)
            elif self.state_count and self._kernel.slots[0] not in slots_of(checkpoint):
                self.steps = 0  # momentum was 0 before
            checkpoint.read_into(self.chunks(describe))
        if self._scheduler is not None:
            restore_scheduler(self._scheduler, saved["scheduler"] if options else None, saved["steps"])
        if options and saved["class"] == type(self._optimizer).__qualname__:
            restore_groups(self._optimizer, saved["groups"])

    def _create_state(self, scalars: Mapping[str, Any], checkpoint: TensorSource, describe: Describe) -> None:
        """Create the state that torch.optim makes at its first step, for its values to be read into."""
        for parameter, entries in self._owned():
            state: dict[str, Any] = {}
            for slot in slots_of(checkpoint):
                views = zip(entries, self._parts(entries, parameter.detach()), strict=True)
                like = next((c for entry, view in views for c in describe(f"{OPTIMIZER}{slot}/", entry, view)), None)
                if like is not None and (info := checkpoint.info(like.name)) is not None:
                    shape, dtype = info
                    same = shape == like.shape
                    state[slot] = torch.zeros_like(parameter, dtype=dtype) if same else torch.zeros(shape, dtype=dtype)
            for slot, values in scalars.items():
                own = next(iter(self._names(parameter, entries, describe)), None)
                if "all" in values or own in values["each"]:
                    state[slot] = scalar_of_json(values["all"] if "all" in values else values["each"][own])
            if state:
                self._optimizer.state[parameter] = state

    def _owned(self) -> list[tuple[nn.Parameter, Sequence[TensorEntry]]]:
        """Return each parameter of the optimizer with the entries of the layout that it covers."""
        blocks = self.state.layout.parameters
        if self._flat:
            return [(p, block.entries) for p, block in zip(self._parameters, blocks, strict=True)]
        entries = (entry for block in blocks for entry in block.entries)
        return [(p, (entry,)) for p, entry in zip(self._parameters, entries, strict=True)]

    def _names(self, parameter: nn.Parameter, entries: Sequence[TensorEntry], describe: Describe) -> list[str]:
        """Return the full names of the tensors of A that a parameter of the optimizer has elements of."""
        views = zip(entries, self._parts(entries, parameter.detach()), strict=True)
        return list(dict.fromkeys(chunk.name for entry, view in views for chunk in describe("", entry, view)))

    def _tensors_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the tensors of a parameter's state by slot."""
        if self._kernel is None:
            state = self._optimizer.state.get(parameter, {})
            return {slot: value for slot, value in state.items() if not is_scalar(value)}
        index = next(i for i, own in enumerate(self._parameters) if own is parameter)
        return dict(zip(self._kernel.slots, self.state_vectors[index], strict=False)) if self.steps else {}

    def _parts(self, entries: Sequence[TensorEntry], vector: Tensor) -> list[Tensor]:
        """Return the views of a vector that belong to these entries."""
        return [vector[e.start : e.stop].view(e.shape) for e in entries] if self._flat else [vector]

    def end_step(self, state: FlatState) -> None:
        """Note that the parameters are in ``state`` now, and step the scheduler."""
        self.state = state
        if self._scheduler is not None:
            self._scheduler.step()

    def _new_parameters(self, gradient: FlatState) -> list[nn.Parameter]:
        parameters = [nn.Parameter(tensor) for tensor in self._tensors(self.state)]
        for parameter, tensor in zip(parameters, self._tensors(gradient), strict=True):
            parameter.grad = tensor
        return parameters

    def _tensors(self, state: FlatState) -> list[Tensor]:
        return state.parameters if self._flat else state.views.parameters
