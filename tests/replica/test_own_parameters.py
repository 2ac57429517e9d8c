"""Parameters of a replica's own that are carried over to the next A: x becomes A + (x - x_read)."""

from paceline.core.delta import Rebase
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.own_parameters import Exchange, OwnParameters
from tests.engine import programs

EXCHANGE = Exchange(Rebase())


def filled(value: float) -> FlatState:
    state = FlatLayout.of(programs.mlp()).new()
    for vector in state.vectors:
        vector.fill_(value)
    return state


def moved(own: OwnParameters, by: float) -> FlatState:
    """Δ of a replica whose steps have moved x so far."""
    out = own.state.clone()
    for vector, result in zip(own.state.parameters, out.parameters, strict=True):
        vector.add_(by)
        result.copy_(vector)
    own.subtract_read(out)
    return out


def equals(state: FlatState, value: float) -> bool:
    return all(bool((vector == value).all()) for vector in state.parameters)


def test_what_was_moved_stays_and_is_sent_once() -> None:
    own = OwnParameters(filled(1.0), EXCHANGE)
    assert equals(moved(own, 0.5), 0.5)
    own.send(filled(4.0))
    assert equals(own.state, 4.5)
    assert equals(moved(own, 0.25), 0.25)
    own.send(filled(4.0))
    assert equals(own.state, 4.25)


def test_a_checkpoint_has_what_the_next_a_lacks() -> None:
    own = OwnParameters(filled(1.0), EXCHANGE)
    moved(own, 0.5)
    kept = own.kept()
    assert equals(kept, 0.5)
    assert equals(own.state, 1.5), "x itself is what a user's loop sees"
    for anew, x in ((False, 4.5), (True, 4.0)):
        again = OwnParameters.restored(kept, {"version": 3, "anew": anew}, EXCHANGE)
        again.send(filled(4.0))
        assert equals(again.state, x)
        assert equals(moved(again, 0.25), 0.25)
