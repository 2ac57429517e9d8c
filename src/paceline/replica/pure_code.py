"""The bytecode of functions, looked at for what does more than load values and call them.

A value that is loaded is known where the instructions say which it is: a global name, a name of the function around, an
attribute of the module whose method it is. What may be loaded and called is decided by whoever reads
(:mod:`~paceline.replica.pure_forward`).
"""

import builtins
import dis
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn

# Instructions that change what outlives a call, or by which it has what is not looked into here.
_OUTSIDE = ("BEFORE_", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_NAME", "DELETE_SUBSCR", "IMPORT_", "LOAD_BUILD",
            "LOAD_CLASSDEREF", "LOAD_FROM", "LOAD_LOCALS", "LOAD_NAME", "LOAD_SPECIAL", "SEND",
            "STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_SLICE", "STORE_SUBSCR")  # fmt: skip

# Of a generator, which is pure where its function uses it up.
_GENERATOR = ("RETURN_GENERATOR", "YIELD")

# Instructions that leave what the one before has loaded where it is.
_FILLERS = ("CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "MAKE_CELL", "NOP", "PRECALL", "PUSH_NULL", "RESUME")

# Instructions whose result is new, as that of a call is.
_MAKES = ("BUILD_", "CALL", "DICT_", "LIST_")

CONTEXTS: Final = torch.no_grad, torch.enable_grad
"""Contexts of ``with`` that are no more than a mode of autograd, which each operator is recorded under."""

UNKNOWN: Final = object()
"""Stands for a value that is pure, and of which no more is known."""

IMPURE: Final = object()
"""Stands for what is not pure."""

ENTERED: Final = object()
"""Stands for what ``with`` enters."""


class Instruction(NamedTuple):
    """One of a function's, which loads or stores at most one local name.

    Args:
        kind: its name.
        words: its argument: a name, say.
        pushes: how many values more there are on the stack after it.
        jumps: whether another one may come before it, or after.
    """

    kind: str
    words: Any
    pushes: int
    jumps: bool


class Closure:
    """The names that a function has of the one around it."""

    def __init__(self, code: CodeType, cells: Sequence[CellType]) -> None:
        self.cells = dict(zip(code.co_freevars, cells, strict=True))

    def get(self, name: str, default: Any = None, /) -> Any:
        """Return what a name stands for."""
        try:
            return self.cells[name].cell_contents
        except (KeyError, ValueError):  # not a name of it, or one that stands for nothing as yet
            return default


# Names, and what they stand for at the moment: of a package, an object or a class; or of the function around.
Names: TypeAlias = Mapping[str, Any] | Closure


class Super(NamedTuple):
    """What ``super()`` is in a method.

    Args:
        part: the module.
        kind: the class that the method is of.
    """

    part: nn.Module
    kind: type

    def attribute(self, name: str) -> Any:
        """Return a method of the classes after that one."""
        kinds = type(self.part).__mro__
        after = kinds[kinds.index(self.kind) + 1 :]
        found = next((vars(kind)[name] for kind in after if name in vars(kind)), IMPURE)
        if isinstance(found, staticmethod):
            return found.__func__
        return MethodType(found, self.part) if isinstance(found, FunctionType) else IMPURE


class Code(NamedTuple):
    """Code that is looked at.

    Args:
        code: of a function, or of one within it.
        names: its global names.
        closure: those of the function around it.
        part: the module whose method it is; None: it is none's.
        receiver: name of that module in it.
    """

    code: CodeType
    names: Names
    closure: Closure
    part: nn.Module | None
    receiver: str | None

    @classmethod
    def of(cls, function: FunctionType, part: nn.Module | None) -> "Code":
        """Return a function's; ``part`` is its first argument, if any."""
        code = function.__code__
        receiver = next(iter(code.co_varnames), None) if part is not None else None
        return cls(code, function.__globals__, Closure(code, function.__closure__ or ()), part, receiver)

    @property
    def key(self) -> tuple[object, ...]:
        """What else is to be looked at by itself."""
        return self.code, id(self.part), *map(id, self.closure.cells.values())

    def of_super(self) -> Any:
        """Return what ``super()`` is in it."""
        kind = self.closure.get("__class__")
        return IMPURE if self.part is None or kind is None else Super(self.part, kind)

    def makes(self, name: str) -> bool:
        """Return whether a name is one of its own, and stands for nothing that was there before the call."""
        code = self.code
        arguments = code.co_argcount + code.co_kwonlyargcount + (code.co_flags & 4 > 0) + (code.co_flags & 8 > 0)
        if name in code.co_varnames[:arguments]:
            return False
        before, stored = "", list[bool]()
        for each in instructions(code):
            if each.words == name and each.kind.startswith("STORE_"):
                stored.append(before.startswith(_MAKES))
            before = each.kind
        return bool(stored) and all(stored)


class CodeReader(ABC):
    """Reads code, for what is not pure."""

    def __init__(self) -> None:
        self._seen = set[tuple[object, ...]]()
        """Code that has been looked at, or is being; it is pure, or all is not."""

    @abstractmethod
    def is_pure_value(self, value: Any) -> bool:
        """Return whether a value may be used, or called, anyhow."""

    @abstractmethod
    def attribute(self, value: Any, name: str) -> Any:
        """Return an attribute of a value; ``IMPURE`` where more than a look computes it."""

    @abstractmethod
    def outside(self, names: Names, name: str) -> Any:
        """Return what a name stands for outside; ``IMPURE`` where somebody could change that unseen."""

    def is_pure_code(self, looked_at: Code) -> bool:
        """Return whether all that code does is to call what is pure."""
        if looked_at.key in self._seen:
            return True
        self._seen.add(looked_at.key)
        made, value = instructions(looked_at.code), UNKNOWN
        for number, each in enumerate(made):
            if each.kind not in _FILLERS:
                value = self._loaded(looked_at, made[: number + 1], value)
            if value is IMPURE:
                return False
        return True

    def _loaded(self, looked_at: Code, made: Sequence[Instruction], value: Any) -> Any:
        """Return what an instruction loads; ``IMPURE`` where it is not pure.

        Args:
            looked_at: whose it is.
            made: instructions up to that one.
            value: what the one before has loaded.
        """
        (kind, words, _, _), closure, receiver = made[-1], looked_at.closure, looked_at.receiver
        if kind in ("LOAD_ATTR", "LOAD_METHOD"):
            return self.attribute(value, words)
        if kind.startswith("LOAD_SUPER"):
            own = ["__class__", receiver] == [each.words for each in made[-3:-1]]
            return self.attribute(looked_at.of_super(), words) if own else IMPURE
        if value is super:  # with no arguments but those that Python gives it
            called = kind == "CALL" and words == 0
            return looked_at.of_super() if called else UNKNOWN if words == "__class__" else IMPURE
        if value is not UNKNOWN and not self.is_pure_value(value):
            return IMPURE
        if kind == "CALL" and words == 0 and any(value is each for each in CONTEXTS):
            return ENTERED
        if self._changes(looked_at, made, value):
            return IMPURE
        if kind == "LOAD_CONST" and isinstance(words, CodeType):  # a comprehension, or a function of its own
            hidden = {receiver, *closure.cells}.intersection((*words.co_varnames, *words.co_cellvars))
            return UNKNOWN if not hidden and self.is_pure_code(looked_at._replace(code=words)) else IMPURE
        if kind == "LOAD_GLOBAL":
            names = vars(builtins) if looked_at.names.get(words, IMPURE) is IMPURE else looked_at.names
            return super if names.get(words) is super else self.outside(names, words)
        if kind == "LOAD_DEREF" and words in closure.cells:
            return UNKNOWN if words == "__class__" else self.outside(closure, words)
        loads = kind.startswith("LOAD_FAST") or kind == "LOAD_DEREF"
        return looked_at.part if loads and receiver is not None and words == receiver else UNKNOWN

    def _changes(self, looked_at: Code, made: Sequence[Instruction], value: Any) -> bool:
        """Return whether an instruction writes what was there before, may have somebody do so, or catches errors."""
        (kind, words, _, _), receiver = made[-1], looked_at.receiver
        if len(made) > 1 and made[-2].kind == "PUSH_EXC_INFO":
            return kind != "WITH_EXCEPT_START"  # what is caught may depend on values
        if kind == "STORE_SUBSCR":
            place = _place_of_item(made[:-1])
            return place is None or place == receiver or not looked_at.makes(place)
        if kind == "BEFORE_WITH":
            return value is not ENTERED
        if kind.startswith("STORE_") and isinstance(value, (list, dict)):
            return True  # who writes it by another name would not be noticed
        if kind.startswith(("STORE_FAST", "STORE_DEREF")):
            return words == receiver or (kind == "STORE_DEREF" and words in looked_at.closure.cells)
        return kind.startswith(_OUTSIDE if looked_at.code.co_name == "<genexpr>" else _OUTSIDE + _GENERATOR)


def instructions(code: CodeType) -> list[Instruction]:
    """Return the instructions of a function; those of two local names are two.

    >>> [each.words for each in instructions((lambda x, y: x @ y).__code__) if each.kind.startswith("LOAD_FAST")]
    ['x', 'y']
    """
    found = list[Instruction]()
    for each in dis.get_instructions(code):
        jumps = each.is_jump_target or "JUMP" in each.opname
        if isinstance(each.argval, tuple) and "_FAST_" in each.opname:
            kinds = re.findall("(?:LOAD|STORE)_FAST", each.opname)
            pairs = zip(kinds, each.argval, strict=True)
            found += [Instruction(kind, name, 1 if kind == "LOAD_FAST" else -1, jumps) for kind, name in pairs]
        else:
            found.append(
                Instruction(each.opname, each.argval, dis.stack_effect(each.opcode, each.arg, jump=False), jumps)
            )
    return found


def _place_of_item(made: Sequence[Instruction]) -> str | None:
    """Return the name of what an item is stored in; None: it is not loaded by a name just before the item's index.

    Args:
        made: the instructions up to the one that stores.
    """
    missing = 1  # values of the index that are made by instructions before
    for number in range(len(made) - 1, 0, -1):
        missing -= made[number].pushes
        if made[number].jumps:
            return None
        if missing == 0:
            place = made[number - 1]
            return place.words if place.kind.startswith("LOAD_FAST") else None
    return None
