"""Terms of a step and what workers hold, equation by equation."""

from dataclasses import replace

import pytest

from paceline.clock.cluster_file import Links
from paceline.planner.base import TERMS, Arrangement, LayerCost, Numerics, OverlapModel
from paceline.planner.cluster import Cluster, Described, Device, DeviceGroup
from paceline.planner.cost import Step, bubble_s, cost, in_flight
from paceline.planner.search.event_simulation import PartTimes, steps_s
from paceline.planner.shapes.shape import Shape
from paceline.planner.shapes.shape_file import DescribedWorkload
from paceline.planner.stage_division import Divisions, Stage, excess_bytes, splits_tied_layers, stage_of
from paceline.schedule import StageTimes, parse, simulate
from paceline.schedule import in_flight as flying

LINKS = Links(1e10, 1e9, 1e-5, 1e-4)
DEVICE = Device("made", 1e12, 1e9, 1e11)
CLUSTER = Cluster(4, 8, DEVICE, Described(LINKS))
WORK = DescribedWorkload(Shape(8, 64, 4, vocab=1000, sequence=32), DEVICE, 64)
PART = Stage(0.01, 0.02, 0.0, 1_000_000, 500, 70, 30)
NUMERICS = WORK.numerics


def step(arrangement: Arrangement, overlap_model: OverlapModel | None = None) -> Step:
    """With equal stages."""
    return Step(WORK, CLUSTER, arrangement, overlap_model or OverlapModel(), [PART] * arrangement.stages)


def layer(name: str = "", parameters: int = 10, tied: str = "") -> LayerCost:
    """With nothing but parameters."""
    return LayerCost(name, 1.0, 2.0, parameters, 3, 4, tied=tied)


# ------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(("size", "hosts"), [(8, 1), (16, 2), (32, 4)])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: int, hosts: int) -> None:
    group = DeviceGroup(size, 8)
    assert group.hosts == hosts
    found = {c: CLUSTER.messages.seconds(c, 1e8, group) for c in ("all_reduce", "reduce_scatter", "all_gather")}
    # Sums in another order.
    assert found["all_reduce"] == pytest.approx(found["reduce_scatter"] + found["all_gather"], rel=1e-12)


def test_a_collective_takes_its_bytes_and_its_rounds() -> None:
    inside = 3 * 1e-5 + 7 / 8 * 1e8 / 1e10
    between = 2 * 1e-4 + 3 / 4 * 1e8 / 8 / 1e9
    assert CLUSTER.messages.seconds("all_gather", 1e8, DeviceGroup(8, 8)) == pytest.approx(inside)
    assert CLUSTER.messages.seconds("all_gather", 1e8, DeviceGroup(32, 8)) == pytest.approx(inside + between)
    assert CLUSTER.messages.seconds("send", 1e8, DeviceGroup(2, 1)) == pytest.approx(1e-4 + 1e8 / 1e9)
    assert CLUSTER.messages.seconds("all_reduce", 1e8, DeviceGroup(1, 1)) == 0


def test_half_of_the_bandwidth_is_twice_the_time_of_bytes() -> None:
    half = Described(Links(1e10, 1e9, 0.0, 0.0), efficiency=0.5)
    whole = replace(half, efficiency=1.0)
    assert half.seconds("all_reduce", 1e8, DeviceGroup(32, 8)) == 2 * whole.seconds(
        "all_reduce", 1e8, DeviceGroup(32, 8)
    )


# --------------------------------------------------------------------------------------------------------------- stages


def test_what_layers_share_is_there_once_on_a_stage() -> None:
    both = [layer(tied="words"), layer(parameters=7), layer(parameters=12, tied="words")]
    assert stage_of([both], [0], Arrangement(), CLUSTER).parameters == 7 + 12
    assert [stage_of([[each]], [0], Arrangement(), CLUSTER).parameters for each in both] == [10, 7, 12]


def test_one_object_that_is_there_thrice_counts_thrice() -> None:
    same, alike = [layer()] * 3, [layer(), layer(), layer()]
    assert stage_of([same], [0], Arrangement(), CLUSTER) == stage_of([alike], [0], Arrangement(), CLUSTER)


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 1), (2, 3, 1), (4, 8, 2), (8, 64, 4)])
def test_the_bubble_of_equal_stages(p: int, m: int, v: int) -> None:
    found = bubble_s([PART] * p, Arrangement(stages=p, micro_batches=m, chunks=v))
    # (p - 1) / v turns of a stage, 2104.04473 section 2.2; a sum of p numbers.
    assert found == pytest.approx((p - 1) / v * PART.seconds, rel=1e-12)


def test_sequential_waits_for_each_micro_batch() -> None:
    assert bubble_s([PART] * 3, Arrangement(stages=3, micro_batches=5, schedule="sequential")) == pytest.approx(
        5 * 2 * PART.seconds
    )


def test_messages_between_stages_that_overlap_are_those_in_between() -> None:
    arrangement = Arrangement(stages=4, micro_batches=6)
    one = CLUSTER.messages.seconds("send", PART.sent_bytes, CLUSTER.neighbours(arrangement))
    for overlap, seen in ((0.0, 2 * 3 + 2 * 6), (1.0, 2 * 3)):
        found = step(arrangement, OverlapModel(send_overlap=overlap)).messages_s()
        assert found == pytest.approx(seen * one)


@pytest.mark.parametrize(("p", "m", "a"), [(4, 8, 4), (3, 6, 2), (5, 4, 2)])
def test_mini_batches_one_after_the_other(p: int, m: int, a: int) -> None:
    made = Arrangement(stages=p, micro_batches=m, accumulated=a)
    times = StageTimes.equal(p, forward=PART.forward_s, backward_input=PART.backward_s, backward_weight=0.0)
    one_s = max(span.end_ns for span in simulate(parse("1f1b"), times, p, m // a)) / 1e9
    assert m * PART.seconds + bubble_s([PART] * p, made) == pytest.approx(a * one_s)
    assert list(in_flight(made)) == [flying(parse("1f1b"), j, p, m // a) for j in range(p)]


@pytest.mark.parametrize("overlap", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("schedule", "m"), [("sequential", 5), ("pipedream-2bw", 4)])
def test_schedules_whose_closed_forms_are_exact(schedule: str, m: int, overlap: float) -> None:
    made = Arrangement(stages=4, micro_batches=m, schedule=schedule)
    one_s = CLUSTER.messages.seconds("send", PART.sent_bytes, CLUSTER.neighbours(made))
    found = step(made, OverlapModel(send_overlap=overlap)).messages_s()
    each = PartTimes((PART.forward_s,) * 4, (PART.backward_s,) * 4, overlap * one_s, (1 - overlap) * one_s)
    if schedule == "sequential":
        assert m * PART.seconds + bubble_s([PART] * 4, made) + found == pytest.approx(steps_s(made, [each])[0])
    else:
        long, short = (steps_s(replace(made, schedule="1f1b", micro_batches=n), [each])[0] for n in (160, 100))
        assert m * PART.seconds + found == pytest.approx(m * (long - short) / 60)  # as 1F1B once it is under way


# ------------------------------------------------------------------------------------------------------------- replicas


@pytest.mark.parametrize(("divided", "gathers"), [(0, None), (1, 1), (2, 1), (3, 2)])
def test_what_replicas_send(divided: int, gathers: int | None) -> None:
    arrangement = Arrangement(replicas=8, micro_batches=5, divided=divided)
    group, seconds = CLUSTER.replicas(arrangement), CLUSTER.messages.seconds
    sums, parameters = PART.parameters * NUMERICS.gradient, PART.parameters * NUMERICS.parameter
    expected = seconds("all_reduce", sums, group)
    if gathers is not None:
        expected = seconds("reduce_scatter", sums, group) + gathers * seconds("all_gather", parameters, group)
        expected *= 5 if divided == 3 else 1  # of each micro-batch: none keeps all of A, or of its own Δ
    assert step(arrangement).replicas_s(0) == pytest.approx(expected)


def test_replicas_of_one_host_share_what_others_gather() -> None:
    """But for the latency, a second wait; and each counts its part of the parameters, and no slice beside Δ."""
    host, arrangement = replace(CLUSTER, hosts=1, shares_memory=True), Arrangement(replicas=8, divided=1)
    shared = Step(WORK, host, arrangement, OverlapModel(), [PART])
    group, seconds = host.replicas(arrangement), host.messages.seconds
    summed = seconds("reduce_scatter", PART.parameters * NUMERICS.gradient, group)
    assert shared.replicas_s(0) == summed + seconds("all_gather", 0, group)
    held, gathered = shared.memory()[0], step(arrangement).memory()[0]
    assert (held.parameters, held.optimizer) == (gathered.parameters / 8, gathered.optimizer)
    assert held.buffers == gathered.buffers - gathered.gradients / 8
    for other in (replace(arrangement, replicas=4, stages=2), replace(arrangement, divided=0)):
        parts = [PART] * other.stages
        plain, same = (
            Step(WORK, on, other, OverlapModel(), parts) for on in (replace(host, shares_memory=False), host)
        )
        assert plain.memory() == same.memory()
        assert plain.replicas_s(0) == same.replicas_s(0)


def test_summing_hides_in_backward_as_far_as_it_may() -> None:
    arrangement = Arrangement(replicas=8)
    seen = [step(arrangement, OverlapModel(overlap=share)).replicas_s(0) for share in (0.0, 0.01, 1.0)]
    assert seen[0] - seen[1] == pytest.approx(0.01 * PART.backward_s)
    assert seen[2] == 0


@pytest.mark.parametrize("divided", [0, 1, 2, 3])
def test_states_are_divided_as_zero_says(divided: int) -> None:
    held = step(Arrangement(replicas=4, divided=divided)).memory()[0]
    # 1910.02054, figure 1: first the optimizer's, then gradients, then parameters.
    states = [NUMERICS.optimizer, NUMERICS.gradient, NUMERICS.parameter]
    expected = [PART.parameters * each / (4 if divided > at else 1) for at, each in enumerate(states)]
    assert [held.optimizer, held.gradients, held.parameters] == expected


def test_workers_that_share_a_sequence_divide_states_as_replicas_do() -> None:
    held = [step(Arrangement(replicas=r, context=c, divided=3)).memory() for r, c in ((4, 2), (8, 1))]
    assert held[0] == held[1]


def test_who_takes_turns_at_a_stage_sums_its_gradients() -> None:
    turning = Arrangement(stages=2, copies=(3, 1), micro_batches=6)
    each = [step(turning).replicas_s(j) for j in (0, 1)]
    assert each == [CLUSTER.messages.seconds("all_reduce", PART.parameters * NUMERICS.gradient, DeviceGroup(3, 3)), 0.0]
    divided = replace(turning, divided=1)
    held = [each.optimizer for each in step(divided).memory()]
    assert held[1] == 3 * held[0]


def test_stages_of_a_replica_that_spans_hosts_talk_between_hosts() -> None:
    """Eight devices a host: 2 stages of 4 + 4 workers are on one, those of 6 + 4 are not."""
    for copies, on_host in (((4, 4), 2), ((6, 4), 1)):
        assert CLUSTER.neighbours(Arrangement(stages=2, copies=copies, micro_batches=8)).on_host == on_host
    assert CLUSTER.neighbours(Arrangement(stages=2, shards=8, stage_shards=(8, 1))).on_host == 1


def test_each_further_micro_batch_adds_its_gradients() -> None:
    one, four = (step(Arrangement(micro_batches=m)).optimizer_s(0) for m in (1, 4))
    assert four - one == pytest.approx(3 * 3 * NUMERICS.gradient * PART.parameters / DEVICE.memory_bytes_per_s)
    fused = OverlapModel(added_moves=0.0)
    assert step(Arrangement(micro_batches=4), fused).optimizer_s(0) == one


@pytest.mark.parametrize(("schedule", "kept"), [("pipedream", [3, 2, 1]), ("pipedream-2bw", [2, 2, 2])])
def test_streams_keep_versions_of_their_weights(schedule: str, kept: list[int]) -> None:
    made = Arrangement(stages=3, schedule=schedule, micro_batches=1 if schedule == "pipedream" else 3)
    held = step(made).memory()
    assert [each.parameters / (NUMERICS.parameter * PART.parameters) for each in held] == kept
    assert [each.activations / PART.saved_bytes for each in held] == [3, 2, 1]
    assert {(each.gradients, each.optimizer) for each in held} == {(held[0].gradients, held[0].optimizer)}


@pytest.mark.parametrize(
    ("made", "apart"),
    [
        (Arrangement(stages=2), False),
        (Arrangement(stages=2, schedule="pipedream"), True),
        (Arrangement(stages=2, shards=2, stage_shards=(2, 1)), True),
        (Arrangement(stages=3, shards=2, stage_shards=(1, 2, 1), micro_batches=3), False),
    ],
)
def test_what_stages_share_has_to_be_alike_on_all_of_them(made: Arrangement, apart: bool) -> None:
    """The first and the last layer are one embedding."""
    assert splits_tied_layers(Divisions(WORK, CLUSTER).of(made), made) is apart
    untied = replace(WORK, shape=replace(WORK.shape, tied=False))
    assert not splits_tied_layers(Divisions(untied, CLUSTER).of(made), made)


def test_the_update_reads_and_writes_all_states_once() -> None:
    found = step(Arrangement()).optimizer_s(0)
    assert found == pytest.approx(2 * NUMERICS.total * PART.parameters / DEVICE.memory_bytes_per_s)
    assert step(Arrangement(replicas=4, divided=1)).optimizer_s(0) == found / 4


# ---------------------------------------------------------------------------------------------------------------- whole


def test_terms_are_all_there_and_sum_to_the_step() -> None:
    found = cost(WORK, CLUSTER, Arrangement(2, 4, 2, micro_batch=2, micro_batches=8))
    assert tuple(found.terms) == TERMS
    assert found.step_s == sum(found.terms.values())
    assert len(found.memory) == 4
    assert min(each.total for each in found.memory) > 0


def test_stages_that_share_parameters_sum_them() -> None:
    shape = WORK.shape
    apart, untied = WORK, replace(WORK, shape=replace(shape, tied=False))
    one, two = (Arrangement(stages=p) for p in (1, 2))
    summed = CLUSTER.messages.seconds("all_reduce", shape.vocab * shape.hidden * NUMERICS.gradient, DeviceGroup(2, 2))
    found = [cost(each, CLUSTER, a).terms["replicas"] for each in (apart, untied) for a in (one, two)]
    # The embedding has positions beside words, 3 % of it; what is shared is the larger of both layers.
    assert found == [0, pytest.approx(summed, rel=0.04), 0, 0]


def test_habits_add_what_a_step_and_each_micro_batch_take() -> None:
    arrangement = Arrangement(micro_batches=6)
    bare, more = (
        cost(WORK, CLUSTER, arrangement, overlap_model)
        for overlap_model in (OverlapModel(), OverlapModel(step_s=2, micro_batch_s=0.5))
    )
    assert more.step_s - bare.step_s == pytest.approx(2 + 6 * 0.5)


def test_numerics_of_mixed_training_keep_a_copy() -> None:
    assert Numerics(2, 4, 12) == NUMERICS
    assert Numerics.of("fp32", "momentum").total == 12


# --------------------------------------------------------------------------------------------------- memory of backward


def test_gradients_count_beside_what_is_still_kept() -> None:
    """Layers of 3 bytes each; a backward begins with the last one, whose activations are free for those before."""
    plain = [layer(str(number)) for number in range(3)]
    for backward, excess in (((0, 0, 0), 0), ((0, 0, 5), 5), ((5, 0, 0), 0), ((7, 0, 0), 1), ((7, 5, 1), 2)):
        layers = [replace(each, backward_bytes=own) for each, own in zip(plain, backward, strict=True)]
        assert excess_bytes(layers) == excess
        stage = stage_of([layers], [0], Arrangement(), CLUSTER)
        assert (stage.saved_bytes, stage.working_bytes) == (9, excess)


def test_the_slice_of_a_sum_that_a_rank_steps_on_is_beside_delta() -> None:
    among = 4
    plain, divided = (step(Arrangement(replicas=among, divided=level)).memory()[0] for level in (0, 1))
    assert divided.optimizer == plain.optimizer / among
    assert divided.buffers == plain.buffers + plain.gradients / among
