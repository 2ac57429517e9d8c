"""A strategy's ``shard_rules``: of the ways of an operator, the plan may choose among those of one name alone."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import final

from paceline.core.errors import InputError, unknown
from paceline.replica.tensor import possible
from paceline.replica.tensor.base import Call, Way
from paceline.replica.tensor.branches import BRANCH
from paceline.replica.tensor.layouts import Shared, Whole
from paceline.shard_rules import WHOLE, ShardRules


@final
@dataclass
class Override:
    """What is asked for, and what was found of it.

    An operator is known by its module's full name. Asked for a way by name, an operator of that module that has none of
    that name is left to the plan, as long as another one of the module has it; "whole" leaves all of them undivided.

    Args:
        rules: of the strategy.
        owners: node name -> module, as :class:`~paceline.replica.capture.Captured` has it.
        calls: of the captured graph.

    Raises:
        InputError: a pattern that matches no module whose operators have parameters.
    """

    rules: ShardRules
    owners: Mapping[str, str]
    calls: Sequence[Call]
    _found: set[str] = field(default_factory=set)
    """Modules of which an operator is divided as asked."""
    _names: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """Module -> names of its operators' ways, as they came up."""

    def __post_init__(self) -> None:
        known = {module for module, _ in self._with_parameters()}
        for pattern in self.rules:
            if not any(fnmatchcase(module, pattern) for module in known):
                raise unknown("module in shard_rules", pattern, known)

    def allowed(self, call: Call, ways: Sequence[Way]) -> Sequence[Way]:
        """Those among the ways of an operator that the plan may choose."""
        module = possible.module_of(call, self.owners)
        asked = self.rules.of(module)
        others = [way for way in ways if not way.asked]
        if asked is None:
            return others
        if asked == WHOLE:
            return [way for way in ways if _undivided(way)] if possible.parameters(call) else others
        self._names[module] |= {way.name: None for way in ways if way.name}
        named = [way for way in ways if way.name == asked]
        if named:
            self._found.add(module)
        return named or others

    def asks_for_branch(self, call: Call) -> bool:
        """Whether an operator is to be in a branch that one shard works on."""
        return self.rules.of(possible.module_of(call, self.owners)) == BRANCH

    def check(self) -> None:
        """After all operators: raise InputError where a module has no operator with a way of the name asked for."""
        for module, call in self._with_parameters():
            asked = self.rules.of(module)
            if asked not in (None, WHOLE) and module not in self._found:
                raise self._refusal(module, str(asked), call)

    def unplanned(self) -> InputError:
        """The error where no plan does all that is asked for."""
        return InputError(
            f"shard_rules={str(self.rules)!r} divide a parameter that several modules have in more than one way; write "
            "the same way for all of them"
        )

    def _with_parameters(self) -> Iterator[tuple[str, Call]]:
        for call in self.calls:
            if possible.parameters(call):
                yield possible.module_of(call, self.owners), call

    def _refusal(self, module: str, asked: str, call: Call) -> InputError:
        of_module = [each for name, each in self._with_parameters() if name == module]
        said = f"shard_rules={{{str(self.rules.pattern(module))!r}: {asked!r}}}"
        largest = max(possible.most(each, asked, call.shards) for each in of_module)
        if largest:
            return InputError(
                f"{said}: shards={call.shards}, but {module} can be divided by {asked} among {largest} at most; write "
                f"shards={largest}, or {WHOLE} in place of {asked}"
            )
        return InputError(
            f"{said}: {module} ({call.node.name}) has no way {asked!r}; write one of: "
            f"{', '.join((*self._names[module], WHOLE))}"
        )


def _undivided(way: Way) -> bool:
    return all(isinstance(layout, (Whole, Shared)) for layout in (*way.takes, *way.gives))
