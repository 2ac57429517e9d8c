"""A model and its loss as one module, so that the loss can be divided with the rest."""

from typing import Self

from torch import Tensor, nn

from paceline.program import Program, Tree, call


class WithLoss(nn.Module):
    """(input, target) -> the loss of that batch; its tensors have the names that they have in the model.

    Args:
        program: says the loss.
        model: whose tensors and children it has; itself it is no child, or names would begin with one more word.
    """

    def __new__(cls, program: Program, model: nn.Module) -> Self:
        """Of a class of its own, for messages to name the model's."""
        del program
        return super().__new__(type(type(model).__name__, (cls,), {"__module__": cls.__module__}))

    def __init__(self, program: Program, model: nn.Module) -> None:
        super().__init__()
        self._model, self._loss = (model,), program.loss
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training

    def forward(self, inputs: Tree, target: Tree) -> Tensor:
        """One number."""
        (model,) = self._model
        return self._loss(call(model, inputs), target)

    def train(self, mode: bool = True) -> "WithLoss":
        """Also the model itself, which may look at its own mode."""
        super().train(mode)
        self._model[0].training = mode
        return self
