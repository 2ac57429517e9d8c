"""Which models may have graphs by default: those whose forward does nothing but return what follows from its input."""

import functools
import importlib
import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from paceline.replica.pure_forward import Setting, pure
from tests.replica import pure_models

T = TypeVar("T")

SCALE, MASK, SIZES, ITEMS = 2.0, torch.ones(6), [6], iter([1])
SEEN = list[Tensor]()


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def noting(x: Tensor) -> Tensor:
    SEEN.append(x)
    return x


def is_pure(module: nn.Module, loss: Callable[..., Any]) -> bool:
    return pure(module, loss) is not None


class Config:
    """Settings of a model, which it holds as one object."""

    heads = 2

    def __init__(self) -> None:
        self.scale, self.calls, self.inner = 2.0, 0, SimpleNamespace(shift=1.0)

    @property
    def counted(self) -> int:
        self.calls += 1
        return self.calls


class Lazy(Config):
    """Settings that are computed as they are asked for."""

    def __getattr__(self, name: str) -> float:
        self.calls += 1
        return float(self.calls)


class Base(nn.Module, Generic[T]):
    """What forwards of tests are about."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.layers = nn.Linear(6, 6), nn.Dropout(0.1), nn.ModuleList([nn.Linear(6, 6)])
        self.factor, self.calls, self.kept, self.hidden = 2.0, 0, list[Tensor](), (nn.Linear(6, 6),)
        self.config, self.lazy, self.options, self.sizes = Config(), Lazy(), {"scale": 2.0, "shape": [2, 3]}, [2, 3]
        self.many = list(range(100))

    @property
    def counted(self) -> float:
        self.calls += 1
        return self.factor

    @property
    def doubled(self) -> float:
        return 2 * self.factor

    @staticmethod
    def halved(x: Tensor) -> Tensor:
        return x / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)  # type: ignore[no-any-return]

    def log(self, name: str, value: Tensor) -> None:
        print(name, value)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor / math.sqrt(x.shape[-1])

    def tally(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Counts(Base[int]):
    """One whose methods count."""

    def forward(self, x: Tensor) -> Tensor:
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


def checked(self: Any, x: Tensor) -> Any:
    if x.dim() < 2:
        raise ValueError(f"{x.dim()} dims are too few")
    return self.halved(x) * self.doubled


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.std()
    return self.first(x / scale)  # type: ignore[no-any-return]


def settings(self: Any, x: Tensor) -> Any:
    x = x * self.config.scale * self.config.heads + self.config.inner.shift
    return x.view(-1, *self.sizes) * self.options["scale"] / np.sqrt(self.config.heads)


def items(self: Any, x: Tensor) -> Any:
    rows = torch.zeros_like(x)
    named: dict[str, Any] = {}
    rows = torch.ones_like(rows)
    for number, layer in enumerate(self.layers):
        rows[:, number : number + 1] = x[:, :1]
        named[f"layer {number}"] = layer(x)
    return rows + named["layer 0"]


def parts_by_their_names(self: Any, x: Tensor) -> Any:
    for part in self.children():
        x = part(x) if x.dim() > 1 else x
    return [x.to(parameter.dtype) for parameter in self.parameters()], [part.weight for part in self.layers]


def closure(factor: float) -> Callable[..., Any]:
    return lambda _, x: x * factor


class Twice(Base[int]):
    """One whose forward is that of the class below, and more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().halved(x))


PURE: dict[str, nn.Module] = {
    "comprehensions": of(comprehensions),
    "a global number": of(lambda _, x: x * SCALE + MASK[: x.shape[-1]]),
    "layers": of(layers),
    "helpers": of(helpers),
    **{each.__name__: of(each) for each in (checked, without_gradients, settings, items, parts_by_their_names)},
    "a closure": of(closure(2.0)),
    "the class below": Twice(),
    "a function of the class below": of(lambda self, x: Base.forward(self, x + 1)),
    "one of PyTorch's, and more": type(
        "Conv", (nn.Conv1d,), {"forward": lambda self, x: self.halved(x), "halved": staticmethod(lambda x: x / 2)}
    )(2, 3, 3),
    "a static method of PyTorch's": of(lambda _, x: nn.Transformer.generate_square_subsequent_mask(x.shape[0])),
    "through a name": of(through_a_name),
    "PyTorch's own": nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.LayerNorm(12)),
    "a static method": of(staticmethod(lambda: None)),
    "recurrent": nn.LSTM(3, 4, batch_first=True),
    "attention": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
}


PURE |= {name: make() for name, (make, _) in pure_models.CASES.items()}


@pytest.mark.parametrize("module", PURE.values(), ids=list(PURE))
def test_pure(module: nn.Module) -> None:
    assert is_pure(module, F.cross_entropy)


def read(module: nn.Module) -> dict[str, Setting]:
    """What a pure module reads from outside."""
    reads = pure(module, F.cross_entropy)
    assert reads is not None
    assert all(each.unchanged for each in reads)
    return {each.name: each for each in reads}


def test_global_names_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = pure(PURE["a global number"], lambda output, target: (output - target).sum() * SCALE)
    assert reads is not None
    assert {(each.name, each.unchanged) for each in reads} == {("SCALE", True), ("MASK", True)}
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert {(each.name, each.unchanged) for each in reads} == {("SCALE", False), ("MASK", True)}
    assert pure(PURE["layers"], F.cross_entropy) == []


def test_settings_of_objects_that_are_read() -> None:
    module: Any = of(settings)
    reads = read(module)
    assert reads.keys() == {"scale", "heads", "shift", "sizes", "options"}
    module.config.scale, module.config.inner.shift = 3.0, 1.0
    module.sizes.append(1)
    assert {name for name, each in reads.items() if not each.unchanged} == {"scale", "sizes"}
    module.sizes.pop()
    module.options["shape"][0] = 3
    module.config.inner.shift = 2.0
    assert {name for name, each in reads.items() if not each.unchanged} == {"scale", "options", "shift"}
    del module.config.scale, module.options["shape"]
    assert {name for name, each in reads.items() if not each.unchanged} == {"scale", "options", "shift"}


def test_names_log_by_another_name_that_are_read() -> None:
    factor, sizes = 2.0, (2, 3)

    def change() -> None:
        nonlocal factor
        factor += 1

    reads = read(of(lambda _, x: x.view(sizes) * factor))
    change()
    assert {name: each.unchanged for name, each in reads.items()} == {"factor": False, "sizes": True}


def test_a_global_list_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = read(of(lambda _, x: x.view(*SIZES)))
    SIZES.append(1)
    assert not reads["SIZES"].unchanged
    SIZES.pop()
    assert reads["SIZES"].unchanged
    monkeypatch.setitem(globals(), "SIZES", list(SIZES))
    assert not reads["SIZES"].unchanged


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


def under_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return 2 * x


def by_a_name(self: Any, x: Tensor) -> Tensor:
    context = torch.inference_mode()
    with context:
        return 2 * x


def an_item_of_the_input(self: Any, *inputs: Tensor) -> Tensor:
    inputs[0][0] = 0.0
    return inputs[0]


def an_item_by_another_name(self: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y = x
    y[0] = 0.0
    return y


def an_item_of_what_there_is(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        layer[0] = x
    return x


def a_dict(self: Any, x: Tensor) -> Tensor:
    self.options.update(scale=3.0)
    return x


def log_by_another_name(self: Any, x: Tensor) -> Tensor:
    logger = self
    logger.log("mean", x.mean())
    return x


def catches(self: Any, x: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(x)  # type: ignore[no-any-return]
    except RuntimeError:
        return x


def catches_all(self: Any, x: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(x)  # type: ignore[no-any-return]
    except:  # noqa: E722 (that is what it is about)
        return x


def makes_an_object(self: Any, x: Tensor) -> Tensor:
    return Config().counted * x


def imports(self: Any, x: Tensor) -> Tensor:
    import time

    return x * time.time()


def another_self(self: Any, x: Any) -> Any:
    self = x
    return self.sum()


def backward(self: Any, x: Tensor) -> Tensor:
    x.sum().backward()  # type: ignore[no-untyped-call]
    return x


class Above(Counts):
    """One whose forward is that of the class below."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Named(Base[int]):
    """The same in words that are not looked into."""

    def forward(self, x: Tensor) -> Tensor:
        return super(Named, self).forward(x)  # noqa: UP008 (that is what it is about)


def counting() -> Callable[..., Any]:
    calls, last = 0, [0]

    def forward(_: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += last[0]
        return x

    return forward


def keeping() -> Callable[..., Any]:
    kept: list[Tensor] = []

    def forward(_: Any, x: Tensor) -> Tensor:
        kept.append(x)
        return x

    return forward


def as_a_method_of_a_tensor(self: Any, x: Tensor) -> Tensor:
    part = self
    return part.mean(x)  # type: ignore[no-any-return]


def generator(self: Any, x: Tensor) -> Any:
    yield self.first(x)


IMPURE: dict[str, nn.Module] = {
    **{each.__name__: of(each) for each in (attribute, a_list, a_list_by_a_name, item, printed, a_default, seeds)},
    **{each.__name__: of(each) for each in (sets_a_mode, under_autocast, by_a_name, imports, another_self, backward)},
    **{each.__name__: of(each) for each in (an_item_of_the_input, an_item_by_another_name, an_item_of_what_there_is)},
    **{each.__name__: of(each) for each in (a_dict, log_by_another_name, makes_an_object, catches, catches_all)},
    "a closure that counts": of(counting()),
    "a closure that keeps": of(keeping()),
    "the class below, which counts": Above(),
    "a class below by its name": Named(),
    "an object's property": of(lambda self, x: x * self.config.counted),
    "an object that computes": of(lambda self, x: x * self.lazy.scale),
    "an object itself": of(lambda self, x: self.scaled(self.config)),
    "a global iterator": of(lambda _, x: x * next(ITEMS)),
    "a long list": of(lambda self, x: x * self.many[0]),
    "a part's method that counts": of(lambda self, x: [layer.tally(x) for layer in self.layers]),
    "a function that notes": of(lambda _, x: noting(x)),
    "a comprehension that counts": of(lambda self, x: sum(self.tally(row) for row in x)),
    "a function within that notes": of(lambda _, x: [(lambda y: noting(2 * y))(row) for row in x]),
    "another self within": of(lambda self, x: (lambda self: self.scaled(x))(self.layers[0])),
    "a generator": of(generator),
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
    assert not is_pure(of(lambda _, x: SCALE.sum(x)), F.mse_loss)  # type: ignore[attr-defined]


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
