"""Other functions in the place of some operators of a part, at no cost to all the rest.

Nodes of a captured graph get another target. Modules that are called whole (children of an nn.Sequential) keep theirs;
but those inside whose forward is known to call such functions, as nn.Linear calls ``F.linear``, get a forward of the
same code in which ``F`` stands for other functions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeAlias

from torch import nn
from torch.fx import GraphModule
from torch.nn import functional

Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Substitutes:
    """What is called instead, with the same arguments.

    Args:
        operators: for targets of nodes.
        functions: for functions of ``torch.nn.functional``, by name.
        users: kinds of modules that call such functions -> the method in which they do.
    """

    operators: Mapping[Any, Function]
    functions: Mapping[str, Function]
    users: Mapping[type[nn.Module], str]


def substitute(module: nn.Module, substitutes: Substitutes) -> bool:
    """Put functions in the place of others; returns whether there were any. The module is changed in place."""
    found = False
    for each in module.modules():
        if isinstance(each, GraphModule):
            found |= _retarget(each, substitutes.operators)
        for kind, method in substitutes.users.items():
            if isinstance(each, kind):
                other = rebound(getattr(type(each), method), F=_namespace(substitutes.functions))
                setattr(each, method, MethodType(other, each))
                found = True
    return found


def rebound(function: Any, **names: Any) -> Any:
    """A function of the same code, for which some global names stand for something else.

    >>> def area(r): return PI * r * r
    >>> rebound(area, PI=3)(2)
    12
    """
    known = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _namespace(functions: Mapping[str, Function]) -> SimpleNamespace:
    """``torch.nn.functional`` but for some functions."""
    return SimpleNamespace(**{**vars(functional), **functions})


def _retarget(graph: GraphModule, operators: Mapping[Any, Function]) -> bool:
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and node.target in operators]
    for node in nodes:
        node.target = operators[node.target]
    if nodes:
        graph.recompile()
    return bool(nodes)
