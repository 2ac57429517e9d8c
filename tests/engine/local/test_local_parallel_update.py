"""Updates that waiting replicas make, each a part: they are those of one process, whoever dies over his part."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam

from paceline import PacelineError, Run, Strategy
from paceline.engine.local import parallel_update
from paceline.engine.local.arena import ParameterArena
from paceline.engine.local.control_block import UpdateSlice
from paceline.engine.local.fault_injection import EventScript
from paceline.engine.local.parallel_update import LINE, ParallelUpdate, chunks
from tests import oracle
from tests.engine import programs
from tests.engine.local import moments
from tests.engine.local.test_local_kills import assert_went_on, without_one
from tests.engine.local.test_local_parity import FEATURES, ROUNDING
from tests.engine.test_virtual_parity import TwoTypes

Local = Callable[..., Run]

STEPS = 6

STATEFUL = functools.partial(SGD, lr=0.1, momentum=0.9)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All updates that can be are made in parts; how many replicas made each."""
    seen: list[int] = []
    plain = ParallelUpdate.apply

    def apply(self: ParallelUpdate, *args: Any) -> None:
        plain(self, *args)
        seen.append(min(3, len(args[-1])))

    monkeypatch.setattr(parallel_update, "WORTH_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(ParallelUpdate, "apply", apply)
    return seen


DIVISIBLE = sorted(FEATURES.keys() - {"groups"})


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "clipping", "all of them"])
def test_each_makes_its_part(local: Local, made: list[int], name: str) -> None:
    fields, bound = FEATURES[name]
    program = programs.program(model=programs.wide, **fields)
    trained = local(program, Strategy(replicas=3), steps=13)
    oracle.assert_same(trained.model, oracle.one_process(program, 3, 13), bound)
    assert made == [3] * 13


def test_without_room_for_parts_main_makes_all(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    claims: list[str] = []
    plain = ParameterArena.commit

    def commit(self: ParameterArena, *names: str) -> None:
        if "sum" in names:
            claims.extend(names)
            raise PacelineError("none left")
        plain(self, *names)

    monkeypatch.setattr(parallel_update, "WORTH_BYTES", 0)
    monkeypatch.setattr(ParameterArena, "commit", commit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    program = programs.program(optimizer=STATEFUL)
    trained = local(program, Strategy(replicas=3), steps=4)
    oracle.assert_same(trained.model, oracle.one_process(program, 3, 4), ROUNDING)
    assert claims == ["sum", "memory 0 0", "memory 1 0"]  # it is asked for once


@pytest.mark.parametrize("name", DIVISIBLE)
def test_rounds_made_in_parts_are_those_of_one_process(local: Local, made: list[int], name: str) -> None:
    fields, bound = FEATURES[name]
    program = programs.program(**fields)
    trained = local(program, Strategy(replicas=4), steps=13)
    oracle.assert_same(trained.model, oracle.one_process(program, 4, 13), bound)
    assert made == [3] * 13


def test_what_cannot_be_divided_is_made_by_main(local: Local, made: list[int]) -> None:
    fields, bound = FEATURES["groups"]
    program = programs.program(**fields)
    trained = local(program, Strategy(replicas=4), steps=5)
    oracle.assert_same(trained.model, oracle.one_process(program, 4, 5), bound)
    assert not made


@pytest.mark.parametrize("model", ["batchnorm", "convolution"])
def test_running_means_go_with_them(local: Local, made: list[int], model: str) -> None:
    program = programs.program(model=getattr(programs, model), train=programs.data(samples=48), optimizer=STATEFUL)
    trained = local(program, Strategy(replicas=3), steps=STEPS)
    oracle.assert_same(trained.model, oracle.rounds(program, 3, STEPS), ROUNDING)
    assert made


def test_two_dtypes_are_two_vectors(local: Local, made: list[int]) -> None:
    program = programs.program(model=TwoTypes, optimizer=STATEFUL, clip_norm=0.05)
    trained = local(program, Strategy(replicas=2), steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(program, 2, STEPS), 1e-6)  # float32
    assert made


@pytest.mark.parametrize(
    "policy", ["smooth-switch:every=3", "buffered:k=2", "local-steps:period=2", "local-steps:outer=nesterov,period=2"]
)
def test_under_other_policies(local: Local, made: list[int], policy: str) -> None:
    """Made in parts or by main alone, an update is the same."""
    program = programs.program(optimizer=functools.partial(Adam, lr=0.01))
    order = EventScript().order(*((r, k) for k in range(1, STEPS + 1) for r in (2, 0, 1)))
    strategy = f"replicas=3 aggregation={policy}"
    divided = local(program, strategy, steps=STEPS, script=order)
    assert made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelUpdate, "worth", lambda self, deltas: False)
        whole = local(program, strategy, steps=STEPS, script=order)
    oracle.assert_same(divided.model, dict(whole.model.state_dict()), 1e-13)  # Adam's kernel on shorter vectors


# ----------------------------------------------------------------------------------------------- deaths over one's part


def half_a_part(worker: Any) -> None:
    """Die with half of it written, as wrongly as can be."""
    bench = worker._client._slices

    def make(task: Any, part: UpdateSlice) -> float:
        states = [[v] for v in bench._arena.version(task.destination).parameters], bench._arena.memory[1 - task.memory]
        for vector in (v for state in states for vectors in state for v in vectors):
            for span in chunks(len(vector), part):
                vector[span][: (span.stop - span.start) // 2].fill_(7.0)
        moments.die()
        return 0.0

    bench.step = make


def a_part_made_but_not_told(worker: Any) -> None:
    worker._client._control.finish_slice = lambda *_: moments.die()


def a_part_told_but_not_rung(worker: Any) -> None:
    control = worker._client._control
    finish = control.finish_slice

    def finish_and_die(*slice_and_square: Any) -> None:
        finish(*slice_and_square)
        moments.die()

    control.finish_slice = finish_and_die


DEATHS = [half_a_part, a_part_made_but_not_told, a_part_told_but_not_rung]

PROGRAMS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": STATEFUL},
    "adam": {"optimizer": functools.partial(Adam, lr=0.01)},
    "clipping": {"optimizer": STATEFUL, "clip_norm": 0.05},
}


@pytest.mark.parametrize("prepare", DEATHS, ids=lambda prepare: prepare.__name__)
@pytest.mark.parametrize("fields", PROGRAMS)
@pytest.mark.parametrize("replica", [0, 2])
def test_a_round_is_neither_lost_nor_made_twice(
    local: Local, made: list[int], prepare: Callable[[Any], None], fields: str, replica: int
) -> None:
    """What the dead one had pushed counts, once; its part is made again from what was there before."""
    program = programs.program(model=programs.wide, **PROGRAMS[fields])
    loop = functools.partial(moments.loop, replica=replica, step=3, prepare=prepare)
    run = local(program, "replicas=3", steps=STEPS, loop=loop)
    assert_went_on(run, replica)
    assert run.summary["updates"] == STEPS
    assert made == [3] * 3 + [2] * 3
    oracle.assert_same(run.model, without_one(STEPS, replica, 3, program), 1e-9 if fields == "adam" else 1e-12)


# ------------------------------------------------------------------------------------------------------------ the cuts


@given(elements=st.integers(0, 5000), of=st.integers(1, 7), chunk=st.sampled_from([64, 640, 2**16]))
def test_parts_make_the_whole(elements: int, of: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_update, "CHUNK", chunk)
        spans = [span for number in range(of) for span in chunks(elements, UpdateSlice(1, number, of))]
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(elements))
    assert all(span.start % LINE == 0 and span.stop - span.start <= chunk for span in spans)


def test_a_task_is_read_as_it_was_written() -> None:
    from paceline.engine.local.control_block import ControlBlock, UpdateTask
    from paceline.replica.optimizer_kernels import AdamKernel, decode, encode

    board = ControlBlock(memoryview(bytearray(8 * ControlBlock.size(3, 2, 3))), replicas=3, workers=3)
    kernel = AdamKernel(7, 0.1, 0.01, 0.9, 0.999, 1e-8, 1.0)
    deltas = tuple((r, slot, 1 / (r + slot + 1)) for r in range(3) for slot in range(2))
    task = UpdateTask(5, True, False, 1, 2, 0, tuple(encode(kernel)), deltas)
    board.write_task(task)
    read = board.read_task()
    assert read._replace(kernel=()) == task._replace(kernel=())
    assert decode(read.kernel) == kernel
    assert board.pending_slice(1) is None
    board.assign_slice(1, UpdateSlice(5, 0, 2))
    part = board.pending_slice(1)
    assert part == UpdateSlice(5, 0, 2)
    assert board.finished_slices[1] != 5
    board.finish_slice(1, part, 2.5)
    assert (board.pending_slice(1), board.finished_slices[1], board.slice_squares[1]) == (None, 5, 2.5)
    assert board.completed.tolist() == [0, 0, 0]
