"""Workloads made of profiles: what layers take, what is refused, what this host is as a cluster."""

from dataclasses import replace

import pytest

from paceline.clock.cluster_file import Links
from paceline.planner.base import Arrangement
from paceline.planner.cluster import Cluster, Described, Device, DeviceGroup
from paceline.planner.cost import cost
from paceline.planner.devices import LAUNCH_S, device
from paceline.planner.explain import gains
from paceline.planner.program.measured_workload import ELSEWHERE, MeasuredWorkload, cluster_of, elsewhere
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import CostCache, search
from tests.planner.profiles import PROFILE, uncut

# Operations a second with which all but the update is computing, and with which all is launches.
RATES = (1e6, 312e12)


def workload(workers: int = 2) -> MeasuredWorkload:
    return MeasuredWorkload(PROFILE, workers, 8)


def test_layers_take_what_lines_say_with_as_many_at_work() -> None:
    first = workload(1).layers(Arrangement(micro_batch=8))[0]
    assert (first.forward_s, first.backward_s) == pytest.approx((1.8e-3, 3.6e-3))
    assert workload(2).layers(Arrangement(micro_batch=8))[0].forward_s == pytest.approx(1.5 * 1.8e-3)
    assert [layer.output_bytes for layer in workload().layers(Arrangement(micro_batch=2))] == [80, 80, 160, 0]


def test_shards_have_their_part_and_its_collectives() -> None:
    _, middle, head, _ = workload(1).layers(Arrangement(shards=2, micro_batch=8))
    assert middle.forward_s == pytest.approx((1e-3 + 1.6e-3) / 2)
    assert (middle.parameters, middle.saved_bytes, head.parameters) == (10, (8 + 320) // 2, 50)
    assert [(call.collective, call.size_bytes) for call in middle.backward_calls] == [("all_reduce", 320)]
    assert [(call.collective, call.size_bytes) for call in head.forward_calls] == [("all_gather", 16 + 640)]


def test_what_shards_sum_once_a_step_is_spread_over_its_micro_batches() -> None:
    first = workload().layers(Arrangement(shards=2, micro_batches=4, micro_batch=2))[0]
    assert [call.size_bytes for call in first.backward_calls] == [200]


def test_what_is_computed_again_takes_forward_once_more_and_keeps_nothing() -> None:
    plain, again = (workload().layers(Arrangement(micro_batch=8, recompute=how)) for how in ("none", "full"))
    for one, other in zip(plain, again, strict=True):
        assert other.backward_s == pytest.approx(one.forward_s + one.backward_s)
        assert other.saved_bytes == 0
    assert again[0].working_bytes == sum(layer.saved_bytes for layer in plain) // 2  # √4 pieces


@pytest.mark.parametrize(
    ("arrangement", "why"),
    [
        (Arrangement(replicas=3), "3 workers, but there are 2"),
        (Arrangement(stages=2, chunks=3), "6 parts, but the model has 4"),
        (Arrangement(shards=2, micro_batch=0.5), "micro-batches of 0.5 samples"),
    ],
)
def test_what_does_not_fit_is_refused(arrangement: Arrangement, why: str) -> None:
    assert why in str(workload().refusal(arrangement))


def test_what_can_not_be_divided_or_cut_says_why() -> None:
    assert "into 3" in str(MeasuredWorkload(replace(PROFILE, busy=PROFILE.busy), 3, 8).refusal(Arrangement(shards=3)))
    assert "not profiled for shards=4" in str(MeasuredWorkload(PROFILE, 4, 8).refusal(Arrangement(shards=4)))
    whole = MeasuredWorkload(uncut(), 2, 8)
    for arrangement in (Arrangement(stages=2), Arrangement(shards=2)):
        assert "branches on values" in str(whole.refusal(arrangement))
    assert whole.refusal(Arrangement(replicas=2)) is None


def test_short_passes_are_not_split() -> None:
    """On a CPU all schedules run them as lists of operators, two halves in no less time than a whole."""
    split = Arrangement(stages=2, schedule="zero-bubble", micro_batches=2, micro_batch=4)
    assert "where backward in halves gains nothing" in str(workload().refusal(split))
    assert workload().refusal(replace(split, schedule="1f1b")) is None
    assert MeasuredWorkload(PROFILE, 2, 8, scale=100.0).refusal(split) is None  # where they take longer
    assert MeasuredWorkload(PROFILE, 2, 8, launch_s=1e-6).refusal(split) is None  # on devices with launches


def test_this_host_is_a_cluster_of_what_was_measured() -> None:
    here = cluster_of(PROFILE, 2)
    assert (here.workers, here.device.flops_per_s, here.device.kind) == (2, 1e9, "cpu")
    assert here.device.memory_bytes * 2 == PROFILE.machine.memory_bytes
    assert 2 * 16 * 120 / here.device.memory_bytes_per_s == pytest.approx(1e-6)  # an update, as it was measured
    assert here.messages.seconds("all_reduce", 2**20, DeviceGroup(2, 2)) == pytest.approx(1e-4 + 2**20 * 1e-9)


def test_one_process_has_nobody_to_send_to() -> None:
    alone = cluster_of(replace(PROFILE, points=()), 1)
    assert alone.messages.seconds("all_reduce", 1e6, DeviceGroup(1, 1)) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_search_finds_strategies_for_it(workers: int) -> None:
    asked = Objectives(workers=workers, engine="local", fixed="replica", simulated=200)
    found = search(workload(workers), cluster_of(PROFILE, workers), asked).plans
    sizes = {(plan.arrangement.replicas, plan.arrangement.stages, plan.arrangement.shards) for plan in found}
    assert sizes == ({(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)} if workers == 2 else {(1, 1, 1)})


def test_elsewhere_times_follow_the_devices_operations() -> None:
    device = Device("faster", 4e9, 1e12, 1e12)
    there = elsewhere(PROFILE, Cluster(1, 4, device, Described(Links(1e9, 1e9))), 8)
    assert there.layers(Arrangement(micro_batch=8))[3].forward_s == pytest.approx(1.5e-3 / 4)
    assert there.spread == ELSEWHERE
    assert "scaled by 0.25" in there.provenance["compute"]


def test_elsewhere_no_operator_takes_less_than_its_launches() -> None:
    """55.9 ns was predicted for a step on an A100, since a small model's operators are launches and little else."""
    a100, launch_s = device("A100-80GB"), LAUNCH_S["cuda"]
    cluster = Cluster(1, 1, a100, Described(Links(1e9, 1e9)))
    there = elsewhere(PROFILE, cluster, 8)
    layers = there.layers(Arrangement(micro_batch=8))
    assert [each.forward_s for each in layers] == [launch_s] * 4
    assert [each.backward_s for each in layers] == [2 * launch_s] * 3 + [launch_s], "the loss has no weights"
    found = cost(there, cluster, Arrangement(micro_batch=8))
    assert found.terms["compute"] == pytest.approx(11 * launch_s)
    assert found.terms["optimizer"] == launch_s
    # A second micro-batch: its operators once more, and its Δ added.
    twice = cost(there, cluster, Arrangement(micro_batch=4, micro_batches=2))
    assert (twice.terms["compute"], twice.terms["optimizer"]) == (pytest.approx(22 * launch_s), 2 * launch_s)


def test_a_device_with_more_operations_launches_no_faster() -> None:
    slow, fast = (Cluster(1, 1, replace(device("A100-80GB"), flops_per_s=f), Described(Links(1e9, 1e9))) for f in RATES)
    for cluster, share in ((slow, pytest.approx(1 - 1 / 1.1, rel=1e-3)), (fast, 0.0)):
        there = elsewhere(PROFILE, cluster, 8)
        made = CostCache(there, cluster).plan(Arrangement(micro_batch=8))
        assert max(gain.share for gain in gains(made, there, cluster) if gain.resource == "compute") == share


def test_times_that_were_measured_here_have_no_floor() -> None:
    assert cluster_of(PROFILE, 2).device.launch_s == workload(2).launch_s == 0.0
