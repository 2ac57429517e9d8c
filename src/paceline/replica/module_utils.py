"""Modules: read their options, get one by name, build one within bounded memory, run one without leaving a trace."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration
from torch.nn.parameter import is_lazy

from paceline.comm.shared_memory import SpillAllocator
from paceline.device import own_generators
from paceline.program import Program, Tree, call

T = TypeVar("T")


def per_dim(value: int | Sequence[int], dims: int) -> list[int]:
    """Return an option of a convolution as a number for each dim, from one for all of them or one for each.

    >>> per_dim([3], 2), per_dim(1, 3), per_dim((1, 2), 2)
    ([3, 3], [1, 1, 1], [1, 2])
    """
    each = [value] if isinstance(value, int) else list(value)
    return each * dims if len(each) == 1 else each


def get_or_create_submodule(module: nn.Module, path: str) -> nn.Module:
    """Return the submodule of this full name; it is created where there is none."""
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


def materialize(program: Program, spill: SpillAllocator) -> nn.Module:
    """Build the module with A_0, of which no more than one tensor at a time is in memory that ``spill`` doesn't manage.

    It has the same bits as ``program.build()``, and the same objects refer to each other. A plain tensor on the CPU
    moves as soon as a module is given it; one that something else still refers to stays where it is.
    """

    def move(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        del module, name
        if tensor is None or type(tensor) not in (nn.Parameter, Tensor) or is_lazy(tensor):
            return
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
            return
        storage = tensor.untyped_storage()
        alone = torch._C._storage_Use_Count(storage._cdata) <= 2  # the tensor, and ``storage``
        if alone and storage.nbytes() == tensor.nbytes:
            del storage
            # The parameter object stays, so that tied modules and optimizers still refer to it.
            tensor.data = spill.kept(tensor.data)

    hooks = (
        registration.register_module_parameter_registration_hook(move),
        registration.register_module_buffer_registration_hook(move),
    )
    try:
        module = program.build()
    finally:
        for hook in hooks:
            hook.remove()
    spill.settle()
    return module


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, each under the first of its names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the hooks of modules and of parameters' gradients, each with a name of what has it."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    for name, part in module.named_modules():
        for kind in kinds:
            yield from ((name or type(module).__name__, hook) for hook in getattr(part, kind).values())
    for name, parameter in module.named_parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            yield from ((f"the gradient of {name}", hook) for hook in (hooks or {}).values())


def add_gradients(parameters: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
    """Add gradients that autograd has not computed to the parameters' ``grad``, as autograd does."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


def _named_like(cls: type[T], module: nn.Module) -> type[T]:
    """Return a subclass with the name of a module's class."""
    return type(type(module).__name__, (cls,), {"__module__": cls.__module__})


class WithLoss(nn.Module):
    """(input, target) -> the loss of that batch; its tensors have the names that they have in the model.

    Args:
        program: program with the loss.
        model: the model; it is no child, or names would begin with one more word.
    """

    def __new__(cls, program: Program, model: nn.Module) -> Self:
        """Create an instance of a class with the model's name, for messages."""
        del program
        return super().__new__(_named_like(cls, model))

    def __init__(self, program: Program, model: nn.Module) -> None:
        super().__init__()
        self._model, self._loss = (model,), (program.loss,)  # tuples, so that neither is registered as a child
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        # Tensors that are plain attributes of the model, which a comparison restores.
        vars(self).update((name, value) for name, value in vars(model).items() if isinstance(value, Tensor))

    def forward(self, inputs: Tree, target: Tree) -> Tensor:
        """Return the loss, one number."""
        (model,), (loss,) = self._model, self._loss
        return loss(call(model, inputs), target)

    def train(self, mode: bool = True) -> "WithLoss":
        """Set the mode, of the model too, whose forward may look at it."""
        super().train(mode)
        self._model[0].training = mode
        return self


class TensorPart(nn.Module):
    """A part that takes and returns tensors alone: its other arguments are fixed, its other results left out.

    It has the part's own tensors, under the same names.

    Args:
        part: a module without children that look at it.
        arguments: of the part.
    """

    run: Callable[..., Any]
    """The part's forward."""

    def __new__(cls, part: nn.Module, arguments: Sequence[Any]) -> Self:
        """Create an instance of a class with the part's name, for messages."""
        del arguments
        return super().__new__(_named_like(cls, part))

    def __init__(self, part: nn.Module, arguments: Sequence[Any]) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = part._modules, part._parameters, part._buffers
        vars(self)["run"] = part.forward
        self._arguments = list(arguments)

    def forward(self, *tensors: Tensor) -> Any:
        """Return the tensors among the part's results."""
        return self.rebuild(self.run(*self.flatten(tensors)))

    def flatten(self, inputs: Any) -> list[Any]:
        """Return all arguments."""
        tensors = iter(inputs)
        return [next(tensors) if isinstance(value, Tensor) else value for value in self._arguments]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the tensors among the results."""
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


@contextmanager
def preserve_state(module: nn.Module, *, training: bool = True) -> Iterator[None]:
    """Context manager: the model is in training or evaluation mode, and afterwards all is restored.

    That is: torch's generators, the modes and attributes of all its modules, the lists and dicts among them too, and
    the tensors that :func:`preserve_tensors` restores.
    """
    # Each attribute, and the content of those that are lists or dicts, as those of parameters and children are.
    saved = [
        (vars(part), {k: (v, v.copy() if type(v) in (list, dict) else None) for k, v in vars(part).items()})
        for part in module.modules()
    ]
    with preserve_tensors(module):
        try:
            module.train(training)
            yield
        finally:
            for attributes, before in saved:
                # In place: the module's ``__dict__`` itself cannot be replaced.
                attributes.clear()
                attributes.update({key: value for key, (value, _) in before.items()})
                for value, content in before.values():
                    if isinstance(content, list):
                        value[:] = content
                    elif isinstance(content, dict):
                        value.clear()
                        value.update(content)


@contextmanager
def preserve_tensors(module: nn.Module, others: Mapping[str, Tensor] | None = None, *, seed: int = 0) -> Iterator[None]:
    """Context manager for one run of a model under ``seed``, after which torch's generators continue as before.

    Its buffers, its tensors that are plain attributes, and ``others`` are restored, both objects and values.
    """
    plain = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    values = [(t, t.detach().clone()) for t in (*module.buffers(), *plain, *(others or {}).values())]
    buffers = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    with own_generators(tensors_of(module).values(), seed), torch.enable_grad():
        try:
            yield
        finally:
            for own, before in buffers:
                own.update(before)
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
