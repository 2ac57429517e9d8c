"""Which strategy, how fast, how much memory, and why: predicted from sizes, or from what was measured."""

import sys
from types import FunctionType, ModuleType


class _Package(ModuleType):
    """``paceline.plan`` is the function of that name, so what lies in this package is to be found on the function too.

    Without it ``import paceline.plan.cost as cost`` would ask the function for something that it does not have.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        function = getattr(sys.modules.get("paceline.planning"), "plan", None)
        if isinstance(value, ModuleType) and isinstance(function, FunctionType):
            vars(function)[name] = value


sys.modules[__name__].__class__ = _Package
