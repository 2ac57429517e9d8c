"""Whether a model's forward and loss do the same whenever they are called: they read a batch, tensors and settings.

Then what Python decides in them can be decided once, and a step be a graph by default. That is so of PyTorch's own
layers and functions, and of functions whose bytecode does nothing but call them::

    self.fc2(F.relu(self.fc1(x.flatten(1))))     yes
    x * SCALE                                    yes, for as long as that global name has this value
    self.calls += 1                              no: it writes what is there for longer than a call
    self.log.append(x.mean()), print(x.shape)    no: it does more than return something

Answers err on the side of no. What depends on values of tensors is not looked for here: tracing refuses that.
"""

import builtins
import dis
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from paceline.replica.module_utils import hooks_of

# Instructions that change what outlives a call, or by which it has what is not looked into here.
_OUTSIDE = ("BEFORE_", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_NAME", "DELETE_SUBSCR", "IMPORT_", "LOAD_BUILD",
            "LOAD_CLASSDEREF", "LOAD_FROM", "LOAD_LOCALS", "LOAD_NAME", "LOAD_SPECIAL", "LOAD_SUPER", "SEND",
            "STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_SLICE", "STORE_SUBSCR")  # fmt: skip

# Of a generator, which is pure where its function uses it up.
_GENERATOR = ("RETURN_GENERATOR", "YIELD")

_BUILTINS = (Tensor, abs, bool, dict, enumerate, float, int, isinstance, len, list, max, min, range, reversed, round,
             sum, tuple, zip)  # fmt: skip

# What a value of an unknown type is asked for: a tensor, or a collection that the call has made. Those below do more
# than return something.
_NAMES = {name for kind in (Tensor, list, tuple, dict) for name in dir(kind) if not name.startswith("_")} - {
    "apply_", "backward", "grad", "map_", "map2_", "module_load", "pin_memory", "register_hook", "requires_grad",
    "register_post_accumulate_grad_hook", "requires_grad_", "resize_", "retain_grad", "set_", "share_memory_",
}  # fmt: skip

_SETTINGS = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.device, torch.dtype, torch.layout,
             torch.memory_format)  # fmt: skip

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

_UNKNOWN, _NOTHING = object(), object()


class GlobalName(NamedTuple):
    """A name that forward reads, and what it stood for when that was found out."""

    names: Mapping[str, Any]
    name: str
    value: Any

    @property
    def unchanged(self) -> bool:
        """Whether it stands for that now."""
        return self.names.get(self.name) is self.value


def pure(module: nn.Module, loss: Callable[..., Any]) -> Sequence[GlobalName] | None:
    """Return the settings that a model and its loss read by global names; None: they are not pure.

    If they are, what they do follows from a batch, the model's tensors and its settings, and from these.
    """
    if any(value for name, value in vars(of_all_modules).items() if name.startswith("_global_") and "hooks" in name):
        return None
    models, reader = [each for each in (module, loss) if isinstance(each, nn.Module)], _Reader()
    if any(True for model in models for _ in hooks_of(model)):
        return None
    found = False
    with suppress(Exception):  # of a package that imports what it is asked for, say
        found = reader.is_pure_value(loss) and all(
            reader.is_pure_part(part) for model in models for part in model.modules()
        )
    return list(reader.globals.values()) if found else None


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith(_LAYERS)


def _is_setting(value: object, *, lists: bool = False) -> bool:
    """Return whether nobody can change a value but by putting another in its place.

    Args:
        value: an attribute's.
        lists: whether lists are settings, too, because who reads them does not change them.
    """
    if isinstance(value, (tuple, list) if lists else tuple):
        return all(_is_setting(each, lists=lists) for each in value)
    return isinstance(value, (*_SETTINGS, Tensor, weakref.ref))


class _Code(NamedTuple):
    """Code that is looked at.

    Args:
        code: of a function, or of one within it.
        names: its global names.
        part: the module whose method it is; None: it is none's.
        receiver: name of that module in it.
    """

    code: CodeType
    names: Mapping[str, Any]
    part: nn.Module | None
    receiver: str | None


class _Reader:
    """Looks for what is not pure."""

    def __init__(self) -> None:
        self.globals = dict[tuple[int, str], GlobalName]()
        """Settings that are read by global names."""
        self._within = list[CodeType]()
        """Code that is being looked at."""

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
        # Names by which PyTorch or Python calls it; and a tensor's, for a value of an unknown type may be this part.
        private = any(name.startswith("__") or (name.startswith("_") and hasattr(nn.Module, name)) for name in names)
        if private or names & _NAMES or not all(_is_setting(own[name]) for name in _NAMES & own.keys()):
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
            return isinstance(value.__self__, nn.Module) and self._is_pure_function(value.__func__, value.__self__)
        if isinstance(value, FunctionType):
            return value.__module__ in _FUNCTIONS or self._is_pure_function(value, None)
        if isinstance(value, (BuiltinFunctionType, type)):
            return value in _BUILTINS or any(getattr(where, value.__name__, None) == value for where in _OPERATORS)
        return isinstance(value, nn.Module) or _is_setting(value)

    def _is_pure_function(self, function: object, part: nn.Module | None) -> bool:
        """Return whether all that a function does is to call what is pure; ``part`` is its first argument, if any."""
        if not isinstance(function, FunctionType) or function.__closure__:
            return False
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        receiver = next(iter(function.__code__.co_varnames), None) if part is not None else None
        code = _Code(function.__code__, function.__globals__, part, receiver)
        return all(map(_is_setting, defaults)) and self._is_pure_code(code)

    def _is_pure_code(self, looked_at: _Code) -> bool:
        code, names, part, receiver = looked_at
        if code in self._within:  # it calls itself
            return True
        self._within.append(code)
        outside = _OUTSIDE if code.co_name == "<genexpr>" else _OUTSIDE + _GENERATOR
        value: Any = _UNKNOWN  # what the instruction before has loaded
        for instruction in dis.get_instructions(code):
            kind, words = instruction.opname, instruction.argval
            if kind in ("LOAD_ATTR", "LOAD_METHOD"):
                if isinstance(value, Tensor):
                    value = _UNKNOWN
                if value is _UNKNOWN and words not in _NAMES:
                    return False
                value = value if value is _UNKNOWN else self._attribute(value, words)
                continue
            if value is not _UNKNOWN and not self.is_pure_value(value):
                return False
            value, several = _UNKNOWN, words if isinstance(words, tuple) else (words,)
            if kind.startswith(outside) or (kind.startswith(("STORE_FAST", "STORE_DEREF")) and receiver in several):
                return False
            if kind == "LOAD_CONST" and isinstance(words, CodeType):  # a comprehension, or a function of its own
                if receiver in words.co_varnames or not self._is_pure_code(looked_at._replace(code=words)):
                    return False
            elif kind == "LOAD_GLOBAL":
                value = self._global(names, words)
            elif receiver is not None and several[-1] == receiver and ("LOAD_FAST" in kind or kind == "LOAD_DEREF"):
                value = part
        self._within.pop()
        return True

    def _global(self, names: Mapping[str, Any], name: str) -> Any:
        """Return what a global name stands for; what is no pure value, where somebody could change that unseen."""
        found = names.get(name, getattr(builtins, name, _NOTHING))
        if _is_setting(found):
            self.globals[id(names), name] = GlobalName(names, name, found)
        return found if not isinstance(found, nn.Module | MethodType) else _NOTHING

    def _attribute(self, value: Any, name: str) -> Any:
        """Return an attribute of a module or a package; what is no pure value, where more than a look computes it."""
        if isinstance(value, ModuleType):
            torchs = value is math or value.__name__.partition(".")[0] == "torch"
            return getattr(value, name, _NOTHING) if torchs else self._global(vars(value), name)
        if not isinstance(value, nn.Module):
            return _NOTHING
        of_class = inspect.getattr_static(type(value), name, _NOTHING)
        if of_class is not _NOTHING and not (isinstance(of_class, FunctionType) or _is_setting(of_class)):
            return _NOTHING
        found = getattr(value, name, _NOTHING)
        return _NOTHING if isinstance(found, nn.Module) and value._modules.get(name) is not found else found
