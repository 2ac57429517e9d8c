"""Any value of any registered class, made from the types of its options: a new policy is covered by itself."""

from types import NoneType
from typing import Any, Literal, get_args, get_origin

from hypothesis import reject
from hypothesis import strategies as st

from paceline.aggregation import Aggregation, PerLearningRate
from paceline.core.errors import InputError
from paceline.core.registry import RegisteredClass, family_of
from paceline.core.text_form import alternatives

FLOATS = st.one_of(st.integers(1, 10**6), st.floats(1e-6, 1e6), st.floats(0.01, 0.99))


@st.composite
def _values(draw: st.DrawFn, entry: RegisteredClass, depth: int) -> Any:
    options: dict[str, Any] = {}
    for name, option in entry.options().items():
        if draw(st.booleans()):
            options[name] = draw(st.one_of([s for a in alternatives(option.hint) for s in _of(a, depth)]))
    try:
        return entry.cls(**entry.fixed, **options)
    except InputError:  # options that are fine by themselves, but not together
        reject()


def _of(hint: Any, depth: int) -> list[st.SearchStrategy[Any]]:
    scalars = {
        bool: st.booleans(),
        int: st.integers(1, 1000),
        float: FLOATS,
        NoneType: st.none(),
        PerLearningRate: st.builds(PerLearningRate, FLOATS),
    }
    if hint in scalars:
        return [scalars[hint]]
    if get_origin(hint) is Literal:
        return [st.sampled_from(get_args(hint))]
    kind = family_of(hint)
    if kind is None or depth == 0:
        return [st.nothing()]
    return [_values(entry, depth - 1) for entry in kind.entries.values()]


def policies() -> st.SearchStrategy[Aggregation[Any]]:
    kind = family_of(Aggregation)
    assert kind is not None
    return st.one_of([_values(entry, 2) for entry in kind.entries.values()])
