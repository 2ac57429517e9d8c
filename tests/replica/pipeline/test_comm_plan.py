"""The order of messages, derived by each worker for itself."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.mesh import StageReplicas
from paceline.replica.pipeline.comm_plan import CommPlan, WorkerProgram
from paceline.replica.pipeline.cut import Crossing
from paceline.replica.pipeline.p2p_queue import P2PMessage
from paceline.schedule import parse

SCHEDULES = ["sequential", "gpipe", "1f1b", "zero-bubble", "interleaved:chunks=2", "interleaved:chunks=3"]


@st.composite
def plans(draw: st.DrawFn) -> tuple[CommPlan, int]:
    """Any schedule, skips and columns that take turns, and how many micro-batches there are of those planned for."""
    schedule = parse(draw(st.sampled_from(SCHEDULES)))
    workers = draw(st.integers(1, 5))
    m = workers * draw(st.integers(1, 3)) if schedule.chunks > 1 else draw(st.integers(1, 12))
    parts = schedule.parts(workers)
    crossings = [Crossing(f"v{j}", j, (j + 1,)) for j in range(parts - 1)]
    for k in range(draw(st.integers(0, 4))):
        ends = sorted(draw(st.sets(st.integers(0, parts - 1), max_size=4)))
        if len(ends) > 1:
            crossings.append(Crossing(f"skip{k}", ends[0], tuple(ends[1:])))
    turns = st.integers(1, 3) if schedule.allows_stage_replicas else st.just(1)
    copies = tuple(draw(st.lists(turns, min_size=workers, max_size=workers)))
    return CommPlan(schedule, StageReplicas(copies), m, tuple(crossings), {}), draw(st.integers(1, m))


def ways(plan: CommPlan, count: int) -> list[WorkerProgram]:
    return [plan.worker_program(worker, count) for worker in range(len(plan.stage_replicas))]


@given(plans())
def test_two_workers_have_the_same_order(case: tuple[CommPlan, int]) -> None:
    plan, count = case
    sent: dict[tuple[int, int], list[P2PMessage]] = defaultdict(list)
    expected: dict[tuple[int, int], list[P2PMessage]] = defaultdict(list)
    for worker, way in enumerate(ways(plan, count)):
        for message in (message for task in way.actions for message in task.sends):
            assert message.sender == worker
            if message.receiver != worker:
                sent[worker, message.receiver].append(message)
        for message in way.incoming:
            expected[message.sender, worker].append(message)
    assert sent == expected


@given(plans())
def test_everything_that_is_received_is_sent_once(case: tuple[CommPlan, int]) -> None:
    plan, count = case
    tasks = [task for way in ways(plan, count) for task in way.actions]
    given_ = [message.rank for task in tasks for message in task.sends]
    needed = [message.rank for task in tasks for message in task.receives]
    assert sorted(given_) == sorted(needed) == list(range(len(given_)))
    edges = sum(len(crossing.consumers) for crossing in plan.crossings)
    assert len(given_) == 2 * edges * count


@given(plans())
def test_no_workers_wait_in_a_circle_even_where_sends_block(case: tuple[CommPlan, int]) -> None:
    """As :class:`P2PQueue` does it: before a wait, all receives of lower rank are posted."""
    plan, count = case
    workers = [Rendezvous(way) for way in ways(plan, count)]
    expected: set[int] = set()
    sent: set[int] = set()
    while not all(worker.done for worker in workers):
        moved = [worker.move(expected, sent) for worker in workers]
        assert any(moved), "deadlock"


class Rendezvous:
    """One worker whose sends block until the receive is posted."""

    def __init__(self, way: WorkerProgram) -> None:
        self.steps: list[tuple[str, P2PMessage]] = []
        for task in way.actions:
            self.steps += [("take", m) for m in task.receives if m.sender != m.receiver]
            self.steps += [("send", m) for m in task.sends if m.sender != m.receiver]
        self.incoming = way.incoming
        self.at = 0

    @property
    def done(self) -> bool:
        return self.at == len(self.steps)

    def move(self, expected: set[int], sent: set[int]) -> bool:
        """Go on as far as it can; whether that was anywhere."""
        before = self.at, len(expected)
        while not self.done:
            kind, message = self.steps[self.at]
            expected.update(m.rank for m in self.incoming if m.rank <= message.rank)
            if message.rank not in (sent if kind == "take" else expected):
                break
            if kind == "send":
                sent.add(message.rank)
            self.at += 1
        return (self.at, len(expected)) != before


def test_a_message_describes_itself_in_words() -> None:
    plan = CommPlan(parse("1f1b"), StageReplicas((1, 1)), 4, (Crossing("relu", 0, (1,)),), {})
    there, back = plan.worker_program(1, 4).actions[0].receives[0], plan.worker_program(0, 4).actions[2].receives[0]
    assert there.description == "relu of micro-batch 0, from stage 0 for stage 1 (1F0)"
    assert back.description == "the gradient of relu of micro-batch 0, from stage 1 for stage 0 (0B0)"


@pytest.mark.parametrize("worker", [0, 1])
def test_gradients_of_a_value_come_in_ascending_order_of_its_consumers(worker: int) -> None:
    plan = CommPlan(parse("interleaved:chunks=2"), StageReplicas((1, 1)), 2, (Crossing("a", worker, (2, 3)),), {})
    needs = [task.receives for task in plan.worker_program(worker, 2).actions if task.action.stage == worker]
    backward = [tuple(m.consumer for m in each) for each in needs if each and each[0].gradient]
    assert backward == [(2, 3), (2, 3)]
