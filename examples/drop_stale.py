"""A policy of one's own in one file: asynchronous, but what is too stale is dropped.

Runs as a script, and on the command line:
``paceline train examples/drop_stale.py:program --strategy "replicas=8 aggregation=drop-stale:bound=6"``
"""

from dataclasses import dataclass

from paceline import Aggregation, Apply, Arrival, Decision, Discard, Release, register, train
from paceline.datasets import load_program


@register("drop-stale")
@dataclass(frozen=True)
class DropStale(Aggregation[int]):
    """Apply each Δ on arrival, unless A has had more than ``bound`` updates since it was read.

    The state is A's version.
    """

    bound: int = 4

    def start(self, replicas: int) -> int:
        return 0

    def arrived(self, state: int, arrival: Arrival) -> tuple[int, Decision]:
        release = Release((arrival.replica,))
        if arrival.samples == 0 or state - arrival.version > self.bound:
            return state, (Discard((arrival,)), release)
        return state + 1, (Apply(((arrival, 1.0),)), release)

    def left(self, state: int, replica: int, reason: str) -> tuple[int, Decision]:
        return state, ()

    def joined(self, state: int, replica: int) -> tuple[int, Decision]:
        return state, ()

    def waits_for(self, state: int) -> int:
        return 1


program = load_program("digits", data=None, seed=0, batch_size=32)

if __name__ == "__main__":
    for bound in (2, 8):
        strategy = f"replicas=8 aggregation=drop-stale:bound={bound}"
        figures = train(program, strategy, engine="virtual", epochs=4, delay="exponential:mean=0.02").summary
        print(
            f"bound={bound}: {figures['discarded']} of {figures['gradients']} dropped, "
            f"test accuracy {figures['test_accuracy']:.1%}"
        )
