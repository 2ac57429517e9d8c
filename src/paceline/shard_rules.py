"""A strategy's rules for dividing single operators: an operator strategy's name for each pattern over module names."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import final

from paceline.core.errors import InputError

# The name that leaves an operator undivided.
WHOLE = "whole"

_PATTERN = re.compile(r"(?:[\w.*?-]|\[[\w!-]+\])+")
_NAME = re.compile(r"[\w-]+")


@final
class ShardRules(Mapping[str, str]):
    """Glob pattern over full module names -> name of an operator strategy; the last pattern that matches counts.

    Args:
        rules: the mapping, or its text.

    Raises:
        InputError: a pattern or a name that can't be one.

    >>> rules = ShardRules({"*.c_fc": "column", "head": "whole"})
    >>> str(rules), rules == ShardRules(str(rules))
    ('*.c_fc:column,head:whole', True)
    >>> rules.of("h.0.c_fc"), rules.of("h.0.c_proj")
    ('column', None)
    """

    def __init__(self, rules: Mapping[str, str] | str = "") -> None:
        if not isinstance(rules, str | Mapping):
            raise InputError(f"shard_rules={rules!r} is no mapping; write shard_rules={{'*.c_fc': 'column'}}.")
        self._rules: dict[str, str] = {} if isinstance(rules, str) else dict(rules)
        for word in filter(None, rules.split(",") if isinstance(rules, str) else ()):
            pattern, colon, name = word.rpartition(":")
            if not (colon and pattern and name):
                raise InputError(f"{word!r} in shard_rules is no rule; write <pattern>:<way>, as in head:{WHOLE}.")
            if pattern in self._rules:
                raise InputError(f"shard_rules says {pattern} twice; write {word} once.")
            self._rules[pattern] = name
        for pattern, name in self._rules.items():
            if not (isinstance(pattern, str) and _PATTERN.fullmatch(pattern)):
                raise InputError(
                    f"{pattern!r} in shard_rules is no pattern over module names; write letters, digits, dots, *, ? "
                    "and [...], as in *.c_fc."
                )
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise InputError(
                    f"shard_rules={{{pattern!r}: {name!r}}} names no way; write {{{pattern!r}: '{WHOLE}'}}, say."
                )

    def of(self, module: str) -> str | None:
        """Return the operator strategy of a module; None if no pattern matches."""
        pattern = self.pattern(module)
        return None if pattern is None else self._rules[pattern]

    def pattern(self, module: str) -> str | None:
        """Return the pattern that counts for a module."""
        return next((pattern for pattern in reversed(self._rules) if fnmatchcase(module, pattern)), None)

    def __getitem__(self, pattern: str) -> str:
        return self._rules[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __eq__(self, other: object) -> bool:
        """Compare rules and their order, for the last that matches counts."""
        return isinstance(other, Mapping) and list(self._rules.items()) == list(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self._rules.items()))

    def __str__(self) -> str:
        return ",".join(f"{pattern}:{name}" for pattern, name in self._rules.items())

    def __repr__(self) -> str:
        return repr(self._rules)
