"""Whether a model's forward and loss do the same whenever they are called: they read a batch, tensors and settings.

Then what Python decides in them can be decided once, and a step be a graph by default. That is so of PyTorch's own
layers and functions, and of functions whose bytecode does nothing but call them::

    self.fc2(F.relu(self.fc1(x.flatten(1))))     yes
    x * SCALE, x * self.config.scale             yes, for as long as these have this value
    self.calls += 1                              no: it writes what is there for longer than a call
    self.log.append(x.mean()), print(x.shape)    no: it does more than return something

Answers err on the side of no. What depends on values of tensors is not looked for here: tracing refuses that.
"""

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from paceline.program import map_tree
from paceline.replica.module_utils import hooks_of
from paceline.replica.pure_code import CONTEXTS, ENTERED, IMPURE, UNKNOWN, Code, CodeReader, Names, Super

_BUILTINS = (Tensor, abs, all, any, bool, dict, divmod, enumerate, filter, float, frozenset, int, isinstance, iter, len,
             list, map, max, min, next, pow, range, reversed, round, set, slice, sorted, str, sum, tuple,
             zip)  # fmt: skip

# What a value of an unknown type is asked for: a tensor, or a collection that the call has made. Those below do more
# than return something.
_NAMES = {name for kind in (Tensor, list, tuple, dict) for name in dir(kind) if not name.startswith("_")} - {
    "apply_", "backward", "grad", "map_", "map2_", "module_load", "pin_memory", "register_hook", "requires_grad",
    "register_post_accumulate_grad_hook", "requires_grad_", "resize_", "retain_grad", "set_", "share_memory_",
}  # fmt: skip

_SETTINGS = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.device, torch.dtype, torch.layout,
             torch.memory_format)  # fmt: skip

# Settings of a list or a dict, and what may be asked of it: it is looked at before each step.
_MOST_SETTINGS = 64
_LOOKS = {"copy", "count", "get", "index", "items", "keys", "values"}

# What a module lists of itself.
_LISTS = {getattr(nn.Module, kind) for name in ("buffers", "children", "modules", "parameters")
          for kind in (name, f"named_{name}")}  # fmt: skip

# Where PyTorch's operators are, as functions that are built in, and its functions of them.
_OPERATORS: Any = torch._C._VariableFunctions, torch._C._nn, torch.fft, torch.linalg, torch.special, math
_FUNCTIONS = ("torch.functional", "torch.nn.functional")
_LAYERS = "torch.nn.modules."

# What each module has, and what classes may define without its being called in forward.
_OF_MODULE = frozenset(vars(nn.Module()))
_OF_CLASS = frozenset(vars(type("Empty", (nn.Module,), {"__init__": None, "__annotations__": {}}))) | {
    "__abstractmethods__", "__constants__", "__firstlineno__", "__orig_bases__", "__parameters__", "__qualname__",
    "__static_attributes__", "_abc_impl",
}  # fmt: skip


class Setting(NamedTuple):
    """A value outside of the model that forward reads, and what it was when that was found out."""

    names: Names
    name: str
    value: Any
    content: Any = None
    """A copy, if the value itself can be written; None if it can't."""

    @property
    def unchanged(self) -> bool:
        """Whether it is that now."""
        if self.names.get(self.name) is not self.value:
            return False
        return self.content is None or _same(self.value, self.content)


def pure(module: nn.Module, loss: Callable[..., Any]) -> Sequence[Setting] | None:
    """Return the settings that a model and its loss read from outside; None: they are not pure.

    If they are, what they do follows from a batch, the model's tensors and its settings, and from these.
    """
    if any(value for name, value in vars(of_all_modules).items() if name.startswith("_global_") and "hooks" in name):
        return None
    models = [each for each in (module, loss) if isinstance(each, nn.Module)]
    if any(True for model in models for _ in hooks_of(model)):
        return None
    found, reader = False, _Reader([part for model in models for part in model.modules()])
    with suppress(Exception):  # of a package that imports what it is asked for, say
        found = reader.is_pure_value(loss) and all(map(reader.is_pure_part, reader.parts))
    return list(reader.settings.values()) if found else None


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith(_LAYERS)


def _is_setting(value: Any, *, lists: bool = False) -> bool:
    """Return whether nobody can change a value but by putting another in its place.

    Args:
        value: an attribute's.
        lists: whether lists and dicts of settings are settings, too, because who reads them does not change them.
    """
    if isinstance(value, tuple) or (lists and type(value) in (list, dict)):
        return all(_is_setting(each, lists=lists) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, (*_SETTINGS, Tensor, weakref.ref))


def _same(value: Any, content: Any) -> bool:
    """Return whether a setting still has what it had when it was copied."""
    if isinstance(content, dict):
        return value.keys() == content.keys() and all(_same(value[key], each) for key, each in content.items())
    if isinstance(content, (tuple, list)):
        return type(value) is type(content) and len(value) == len(content) and all(map(_same, value, content))
    return value is content


def _count(value: object) -> int:
    """Return how many settings there are in one."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    return 1 if inner is None else sum(map(_count, inner))


class _Reader(CodeReader):
    """Looks for what is not pure.

    Args:
        parts: all modules that may be asked for something.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = parts
        self.settings = dict[tuple[int, str], Setting]()
        """Those that are read from outside."""
        self._asked = dict[str, bool]()
        """Whether a value of an unknown type may be asked for a name."""

    def is_pure_part(self, part: nn.Module) -> bool:
        """Return whether a module's own forward is pure; its children are looked at by themselves."""
        kind, own = type(part), {name: value for name, value in vars(part).items() if name not in _OF_MODULE}
        if isinstance(part, nn.SyncBatchNorm) or "forward" in own:
            return False
        if _is_of_torch(kind):
            told = all(_is_setting(value, lists=True) or self.is_pure_value(value) for value in own.values())
            return told and kind.forward.__module__.startswith(_LAYERS)  # or somebody has put another in its place
        bases = ("abc", "builtins", "typing")
        others = [each for each in kind.__mro__ if each.__module__ not in bases and not _is_of_torch(each)]
        names = {name for each in others for name in vars(each)} - _OF_CLASS
        # Names by which PyTorch or Python calls it.
        if any(name.startswith("__") or (name.startswith("_") and hasattr(nn.Module, name)) for name in names):
            return False
        if not any("forward" in vars(each) for each in others):
            return not names  # PyTorch's own may call what a subclass has put in another's place
        return self._is_pure_function(kind.forward, part)

    def is_pure_value(self, value: Any) -> bool:
        """Return whether a value may be used, or called, anyhow."""
        if isinstance(value, functools.partial):
            settings = all(map(_is_setting, (*value.args, *value.keywords.values())))
            return settings and isinstance(value.func, FunctionType) and self.is_pure_value(value.func)
        if isinstance(value, MethodType):
            part, function = value.__self__, value.__func__
            return isinstance(part, nn.Module) and (function in _LISTS or self._is_pure_function(function, part))
        if isinstance(value, FunctionType):
            return value.__module__ in _FUNCTIONS or self._is_pure_function(value, None)
        if isinstance(value, (BuiltinFunctionType, np.ufunc, type)):
            raised = isinstance(value, type) and issubclass(value, Exception) and value.__module__ == "builtins"
            known = isinstance(value, np.ufunc) or value in _BUILTINS or value in CONTEXTS
            return raised or known or any(getattr(where, value.__name__, None) == value for where in _OPERATORS)
        return value is ENTERED or isinstance(value, nn.Module) or _is_setting(value, lists=True)

    def _is_pure_function(self, function: object, part: nn.Module | None) -> bool:
        """Return whether all that a function does is to call what is pure; ``part`` is its first argument, if any."""
        if not isinstance(function, FunctionType):
            return False
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return all(map(_is_setting, defaults)) and self.is_pure_code(Code.of(function, part))

    def outside(self, names: Names, name: str) -> Any:
        """Return what a name stands for outside; what is no pure value, where somebody could change that unseen."""
        found = names.get(name, IMPURE)
        if _is_setting(found, lists=True):
            content = None if _is_setting(found) else map_tree(lambda tensor: tensor, found)
            if content is not None and _count(content) > _MOST_SETTINGS:
                return IMPURE
            self.settings[id(names), name] = Setting(names, name, found, content)
        return found if not isinstance(found, nn.Module | MethodType) else IMPURE

    def attribute(self, value: Any, name: str) -> Any:
        """Return an attribute of a value; what is no pure value, where more than a look computes it."""
        if value is UNKNOWN or isinstance(value, Tensor):
            return UNKNOWN if self._may_be_asked(name) else IMPURE
        if isinstance(value, Super):
            return value.attribute(name)
        if isinstance(value, ModuleType):
            torchs = value is math or value.__name__.partition(".")[0] == "torch"
            return getattr(value, name, IMPURE) if torchs else self.outside(vars(value), name)
        if isinstance(value, nn.Module):
            return self._of_part(value, name)
        if isinstance(value, type):
            return self._of_class(value, name)
        if isinstance(value, (list, dict)):
            return UNKNOWN if name in _LOOKS else IMPURE
        if _is_setting(value):
            return UNKNOWN
        kind: Any = type(value)
        looks = kind is SimpleNamespace or kind.__getattribute__ is object.__getattribute__
        if not looks or hasattr(kind, "__getattr__"):
            return IMPURE
        own = getattr(value, "__dict__", {})  # of an object that has settings, say
        if inspect.isdatadescriptor(inspect.getattr_static(kind, name, None)):
            return IMPURE
        return self.outside(own, name) if name in own else self._of_class(kind, name)

    def _of_part(self, part: nn.Module, name: str) -> Any:
        """Return an attribute of a module."""
        of_class = inspect.getattr_static(type(part), name, IMPURE)
        if isinstance(of_class, property):
            return UNKNOWN if self._is_pure_function(of_class.fget, part) else IMPURE
        if name not in vars(part) and isinstance(of_class, (list, dict)):
            return self._of_class(type(part), name)
        if not (of_class is IMPURE or isinstance(of_class, FunctionType | staticmethod) or _is_setting(of_class)):
            return IMPURE
        found = getattr(part, name, IMPURE)
        if isinstance(found, (list, dict)):
            return self.outside(vars(part), name)
        return IMPURE if isinstance(found, nn.Module) and part._modules.get(name) is not found else found

    def _of_class(self, kind: type, name: str) -> Any:
        """Return an attribute of a class."""
        owner = next((each for each in kind.__mro__ if name in vars(each)), None)
        if owner is None or type(kind).__getattribute__ is not type.__getattribute__:
            return IMPURE
        found = vars(owner)[name]
        if isinstance(found, FunctionType | staticmethod):
            return found.__func__ if isinstance(found, staticmethod) else found
        return self.outside(vars(owner), name) if _is_setting(found, lists=True) else IMPURE

    def _may_be_asked(self, name: str) -> bool:
        """Return whether a value of unknown type may be asked for a name.

        It is a tensor, a collection, or a part of the model: each part that has the name has to be pure with it.
        """
        if name not in self._asked:
            self._asked[name] = True  # where it is asked for on the way; if not, all is not pure
            having = [part for part in self.parts if _has(part, name)]
            attributes = (self._of_part(part, name) for part in having)
            known = name in _NAMES or bool(having)
            self._asked[name] = known and all(each is UNKNOWN or self.is_pure_value(each) for each in attributes)
        return self._asked[name]


def _has(part: nn.Module, name: str) -> bool:
    """Return whether a module has something by this name that no tensor has; of a tensor's names, one of its own."""
    own = (vars(part).keys() - _OF_MODULE, part._parameters, part._buffers, part._modules)
    kinds = [kind for kind in type(part).__mro__ if kind not in (nn.Module, object)]
    kinds = [kind for kind in kinds if not (name in _NAMES and _is_of_torch(kind))]
    return any(name in each for each in own) or any(name in vars(kind) for kind in kinds)
