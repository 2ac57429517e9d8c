"""A world without tensors that obeys a policy, and checks the contract at every step."""

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from paceline.aggregation.base import Action, Aggregation, Apply, Arrival, Cancel, Discard, Release

Event = tuple[str, int, int]
"""What happens, to which of those to whom it can happen, and the samples of its Δ: so many seconds after the last."""

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive"] * 8 + ["leave", "join"]),
        st.integers(0, 11),
        st.sampled_from([0, 1, 2, 3]),
    ),
    max_size=60,
)


class World:
    """Replicas as the contract draws them: computing, waiting, or gone."""

    def __init__(self, policy: Aggregation[Any], replicas: int) -> None:
        self.policy, self.deals = policy, policy.portions is not None
        self.state = policy.start(0 if self.deals else replicas)
        self.version = 0
        self.time_s = 0.0
        self.ticks: list[float] = []
        # replica -> the version it has read
        self.computing = {} if self.deals else dict.fromkeys(range(replicas), 0)
        self.portions: dict[int, tuple[int, int]] = {}
        """(batch, number) of the portion that each replica was given last."""
        self.given: dict[tuple[int, int], tuple[int, int]] = {}
        """The same of each Δ that is held, by replica and clock."""
        self.waiting: set[int] = set()
        self.gone: list[int] = []
        self.clocks = dict.fromkeys(range(replicas), 0)
        self.held: list[Arrival] = []
        self.applied: list[Arrival] = []
        self.discarded: list[Arrival] = []
        self.log: list[Action] = []
        self.ending = False
        for replica in range(replicas) if self.deals else ():
            self.waiting.add(replica)
            self._obey("joined", replica)

    @property
    def alive(self) -> set[int]:
        return self.waiting | set(self.computing)

    def play(self, events: list[Event]) -> "World":
        for what, whom, samples in events:
            self.wait(self.time_s + samples)
            candidates = {"arrive": sorted(self.computing), "leave": sorted(self.alive), "join": self.gone}[what]
            if candidates:
                replica = candidates[whom % len(candidates)]
                self.arrive(replica, samples) if what == "arrive" else getattr(self, what)(replica)
        return self

    def finish(self) -> "World":
        """Everybody is done: those who compute bring one more Δ and leave when they are released."""
        self.ending = True
        while self.computing:
            self.wait(self.time_s + 1)
            self.arrive(min(self.computing), 1)
        return self

    def wait(self, until_s: float) -> "World":
        """What arrives at a deadline comes before it."""
        while (deadline := self.policy.deadline(self.state)) is not None and max(deadline, self.time_s) < until_s:
            self.time_s = max(deadline, self.time_s)
            self.ticks.append(self.time_s)
            self._obey("tick", self.time_s)
            later = self.policy.deadline(self.state)
            assert later is None or later > self.time_s, "ticks without end"
        self.time_s = until_s
        return self

    def arrive(self, replica: int, samples: int = 1) -> None:
        self.clocks[replica] += 1
        clock = self.clocks[replica]
        arrival = Arrival(replica, self.computing.pop(replica), clock, samples, self.time_s, loss=1 / clock)
        self.waiting.add(replica)
        self.held.append(arrival)
        if self.deals:
            self.given[replica, clock] = self.portions.pop(replica)
        self._obey("arrived", arrival)

    def leave(self, replica: int, reason: str = "died") -> None:
        self.computing.pop(replica, None)
        self.waiting.discard(replica)
        if reason == "died":
            self.gone.append(replica)
        self._obey("left", replica, reason)

    def join(self, replica: int) -> None:
        self.gone.remove(replica)
        if self.deals:
            self.waiting.add(replica)
        else:
            self.computing[replica] = self.version
        self._obey("joined", replica)

    def _obey(self, method: str, *args: Any) -> None:
        before = repr(self.state)
        after, decision = getattr(self.policy, method)(self.state, *args)
        assert repr(self.state) == before, "a state that was passed in has changed"
        self.state = after
        done = [replica for action in decision for replica in self._execute(action)]
        self._check()
        for replica in done if self.ending else ():
            self.leave(replica, "done")

    def _execute(self, action: Action) -> Iterator[int]:
        self.log.append(action)
        match action:
            case Apply(deltas):
                names = [(a.replica, a.clock) for a, _ in deltas]
                assert deltas
                if self.deals:
                    batch = self.given[names[0]][0]
                    every = [(batch, number) for number in range(self.policy.portions or 0)]
                    assert [self.given[name] for name in names] == every, "each portion of one batch, in their order"
                else:
                    assert names == sorted(set(names)), "the sum is in ascending order"
                self._settle(self.applied, [a for a, _ in deltas])
                self.version += 1
            case Discard(arrivals):
                self._settle(self.discarded, list(arrivals))
            case Release(replicas, portions):
                assert len(portions) == (len(replicas) if self.deals else 0)
                self.portions |= {r: (p.batch, p.number) for r, p in zip(replicas, portions, strict=False)}
                assert list(replicas) == sorted(set(replicas))
                assert self.waiting.issuperset(replicas), "only who waits can be released"
                self.waiting.difference_update(replicas)
                self.computing |= dict.fromkeys(replicas, self.version)
                yield from replicas
            case Cancel(replicas, portions):
                assert len(portions) == (len(replicas) if self.deals else 0)
                self.portions |= {r: (p.batch, p.number) for r, p in zip(replicas, portions, strict=False)}
                assert set(replicas) <= set(self.computing), "only who computes can be cancelled"
                for replica in replicas:
                    self.clocks[replica] += 1
                    self.computing[replica] = self.version

    def _settle(self, fate: list[Arrival], arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.held.remove(arrival)  # a ValueError: applied or discarded twice
        fate.extend(arrivals)

    def _check(self) -> None:
        timed = self.policy.deadline(self.state) is not None
        assert not self.waiting or self.computing or timed, "all who are there wait: a deadlock"
        assert self.alive or not self.held, "nobody is there, and Δs are held"
        assert self.policy.waits_for(self.state) >= 1


def play(policy: Aggregation[Any], replicas: int, events: list[Event]) -> World:
    return World(policy, replicas).play(events)


def arrivals(policy: Aggregation[Any], replicas: int, order: str, samples: int = 1) -> World:
    """The replicas of ``order``, a digit each, arrive one after the other."""
    world = World(policy, replicas)
    for digit in order:
        world.wait(world.time_s + 1).arrive(int(digit), samples)
    return world


def brief(world: World) -> str:
    """The log in short: ``A01`` applied, ``R0`` released, ``D2`` discarded, ``C1`` cancelled."""

    def names(action: Action) -> str:
        match action:
            case Apply(deltas):
                return "".join(str(a.replica) for a, _ in deltas)
            case Discard(dropped):
                return "".join(str(a.replica) for a in dropped)
        return "".join(map(str, action.replicas))

    return " ".join(f"{type(action).__name__[0]}{names(action)}" for action in world.log)
