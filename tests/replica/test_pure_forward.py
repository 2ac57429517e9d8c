"""Which models may have graphs by default: those whose forward does nothing but return what follows from its input."""

import functools
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from paceline.replica.pure_forward import pure

T = TypeVar("T")

SCALE, MASK, SIZES = 2.0, torch.ones(6), [6]
SEEN = list[Tensor]()


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def noting(x: Tensor) -> Tensor:
    SEEN.append(x)
    return x


def is_pure(module: nn.Module, loss: Callable[..., Any]) -> bool:
    return pure(module, loss) is not None


class Base(nn.Module, Generic[T]):
    """What forwards of tests are about."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.layers = nn.Linear(6, 6), nn.Dropout(0.1), nn.ModuleList([nn.Linear(6, 6)])
        self.factor, self.calls, self.kept, self.hidden = 2.0, 0, list[Tensor](), (nn.Linear(6, 6),)

    @property
    def counted(self) -> float:
        self.calls += 1
        return self.factor

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor / math.sqrt(x.shape[-1])

    def tally(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def of(forward: Callable[..., Any], **members: Any) -> nn.Module:
    """A module with this forward."""
    kind: type[nn.Module] = type("Net", (Base,), {"forward": forward, **members})
    return kind()


def layers(self: Any, x: Tensor, training: bool = True) -> Any:
    x = self.drop(F.relu(self.first(x.flatten(1))))
    for layer in self.layers:
        x = layer(x) if self.training and training else x
    parts = []
    for part in x.chunk(2, dim=-1):
        parts.append(part)
    return torch.cat(parts, dim=-1).mean(dim=1, keepdim=True)


def helpers(self: Any, x: Tensor) -> Any:
    return swish(self.scaled(x)).to(torch.float64) + self.first.weight.sum() + math.pi


def through_a_name(self: Any, x: Tensor) -> Any:
    layer = self.layers[0]
    return torch.nn.functional.gelu(layer(x), approximate="tanh")


def comprehensions(self: Any, x: Tensor) -> Any:
    rows = [self.scaled(layer(x)) for layer in self.layers]
    twice = sum(self.first(row) for row in rows)
    return torch.cat([(lambda y: y * 2)(x), twice, *rows], dim=-1)


PURE: dict[str, nn.Module] = {
    "comprehensions": of(comprehensions),
    "a global number": of(lambda _, x: x * SCALE + MASK[: x.shape[-1]]),
    "layers": of(layers),
    "helpers": of(helpers),
    "through a name": of(through_a_name),
    "PyTorch's own": nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.LayerNorm(12)),
    "a static method": of(staticmethod(lambda: None)),
    "recurrent": nn.LSTM(3, 4, batch_first=True),
    "attention": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
}


@pytest.mark.parametrize("module", PURE.values(), ids=list(PURE))
def test_pure(module: nn.Module) -> None:
    assert is_pure(module, F.cross_entropy)


def test_global_names_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = pure(PURE["a global number"], lambda output, target: (output - target).sum() * SCALE)
    assert reads is not None
    assert {(each.name, each.unchanged) for each in reads} == {("SCALE", True), ("MASK", True)}
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert {(each.name, each.unchanged) for each in reads} == {("SCALE", False), ("MASK", True)}
    assert pure(PURE["layers"], F.cross_entropy) == []


def attribute(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x


def a_list(self: Any, x: Tensor) -> Tensor:
    self.kept.append(x)
    return x


def a_list_by_a_name(self: Any, x: Tensor) -> Tensor:
    kept = self.kept
    kept.append(x)
    return x


def item(self: Any, x: Tensor) -> Tensor:
    x[0] = 0.0
    return x


def printed(self: Any, x: Tensor) -> Tensor:
    print(x.shape)
    return x


def a_default(self: Any, x: Tensor, kept: list[Any] = []) -> Tensor:  # noqa: B006 (that is what it is about)
    kept.append(x)
    return x


def seeds(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x


def sets_a_mode(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        layer.eval()
    return x


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return 2 * x


def imports(self: Any, x: Tensor) -> Tensor:
    import time

    return x * time.time()


def another_self(self: Any, x: Any) -> Any:
    self = x
    return self.sum()


def backward(self: Any, x: Tensor) -> Tensor:
    x.sum().backward()  # type: ignore[no-untyped-call]
    return x


def closure(self: Any) -> Callable[..., Any]:
    return lambda _, x: x * self


def as_a_method_of_a_tensor(self: Any, x: Tensor) -> Tensor:
    part = self
    return part.mean(x)  # type: ignore[no-any-return]


def generator(self: Any, x: Tensor) -> Any:
    yield self.first(x)


IMPURE: dict[str, nn.Module] = {
    **{each.__name__: of(each) for each in (attribute, a_list, a_list_by_a_name, item, printed, a_default, seeds)},
    **{each.__name__: of(each) for each in (sets_a_mode, without_gradients, imports, another_self, backward)},
    "a global list": of(lambda _, x: x.view(*SIZES)),
    "a function that notes": of(lambda _, x: noting(x)),
    "a comprehension that counts": of(lambda self, x: sum(self.tally(row) for row in x)),
    "a function within that notes": of(lambda _, x: [(lambda y: noting(2 * y))(row) for row in x]),
    "another self within": of(lambda self, x: (lambda self: self.scaled(x))(self.layers[0])),
    "a generator": of(generator),
    "what a closure has": of(closure(2)),
    "a method that counts": of(lambda self, x: self.tally(x)),
    "a property that counts": of(lambda self, x: x * self.counted),
    "a module that is no child": of(lambda self, x: self.hidden[0](x)),
    "a name of a tensor's method": of(as_a_method_of_a_tensor, mean=Base.tally),
    "a call of its own": of(lambda _, x: x, __call__=lambda self, x: self.tally(x)),
    "attributes of its own": of(lambda _, x: x, __getattr__=nn.Module.__getattr__),
    "a child that counts": nn.Sequential(of(attribute)),
    "PyTorch's own, told what to call": nn.TransformerEncoderLayer(8, 2, 16, activation=noting, batch_first=True),
    "one of PyTorch's with another method": type("Conv", (nn.Conv1d,), {"_conv_forward": attribute})(2, 3, 3),
    "one that communicates": nn.Sequential(nn.SyncBatchNorm(3)),
}  # fmt: skip


@pytest.mark.parametrize("module", IMPURE.values(), ids=list(IMPURE))
def test_impure(module: nn.Module) -> None:
    assert not is_pure(module, F.cross_entropy)


def test_a_forward_of_the_instance_and_hooks() -> None:
    module, hooked = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3))
    module.forward = noting  # type: ignore[assignment, method-assign]
    handle = hooked[0].register_forward_hook(lambda *_: None)
    assert not is_pure(module, F.mse_loss)
    assert not is_pure(hooked, F.mse_loss)
    handle.remove()
    assert is_pure(hooked, F.mse_loss)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters(register: str) -> None:
    module = nn.Linear(6, 3)
    handle = getattr(module.weight, register)(lambda _: None)
    assert not is_pure(module, F.mse_loss)
    handle.remove()
    assert is_pure(module, F.mse_loss)


def test_a_package_that_imports_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = ModuleType("lazy")
    lazy.__getattr__ = lambda name: importlib.import_module(f"no_such_{name}")  # type: ignore[method-assign]
    monkeypatch.setitem(globals(), "SCALE", lazy)
    assert not is_pure(of(lambda _, x: x * SCALE.package), F.mse_loss)  # type: ignore[attr-defined]


def test_another_forward_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_pure(nn.Linear(6, 3), F.mse_loss)
    monkeypatch.setattr(nn.Linear, "forward", lambda _, x: noting(x))
    assert not is_pure(nn.Linear(6, 3), F.mse_loss)


def test_a_hook_of_all_modules() -> None:
    handle = of_all_modules.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_pure(nn.Linear(6, 3), F.mse_loss)
    finally:
        handle.remove()


LOSSES: dict[str, tuple[Callable[..., Any], bool]] = {
    "a function": (F.cross_entropy, True),
    "with options": (functools.partial(F.cross_entropy, label_smoothing=0.1), True),
    "a module": (nn.CrossEntropyLoss(weight=torch.ones(3)), True),
    "a lambda": (lambda output, target: F.mse_loss(output, target) + (output - target).square().mean(), True),
    "a function that notes": (lambda output, target: F.mse_loss(noting(output), target), False),
    "a module that counts": (of(attribute), False),
    "a method": (Base().tally, False),
    "with a list": (functools.partial(a_default, kept=[]), False),
}


@pytest.mark.parametrize(("loss", "pure"), LOSSES.values(), ids=list(LOSSES))
def test_losses(loss: Callable[..., Any], *, pure: bool) -> None:
    assert is_pure(nn.Linear(6, 3), loss) is pure
