"""What a shape takes and holds, layer by layer."""

import re

import pytest

from paceline.clock.cluster_file import Links
from paceline.planner.base import Arrangement, Call, LayerCost
from paceline.planner.cluster import Cluster, Described, Device
from paceline.planner.cost import cost
from paceline.planner.devices import device
from paceline.planner.shapes import blocks
from paceline.planner.shapes.blocks import RankShare, TransformerCosts
from paceline.planner.shapes.gemm_time import DeviceEfficiency
from paceline.planner.shapes.shape import Shape
from paceline.planner.shapes.shape_file import DescribedWorkload

GPT = Shape(4, 1024, 16, vocab=50304, sequence=512)
LLAMA = Shape(4, 1024, 16, 2816, 32000, 512, 4, tied=False, gated=True, positions=False)
A100 = device("A100-80GB")
PLAIN = DeviceEfficiency(fused_scores=False)
S, H, A = 512, 1024, 16


def layers(arrangement: Arrangement, shape: Shape = GPT, kernels: DeviceEfficiency = PLAIN) -> tuple[LayerCost, ...]:
    """On an A100."""
    return tuple(DescribedWorkload(shape, A100, 64, kernels=kernels).layers(arrangement))


def block(kernels: DeviceEfficiency = PLAIN, **arranged: object) -> LayerCost:
    """The second layer."""
    return layers(Arrangement(**arranged), kernels=kernels)[1]  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_layers_have_all_parameters_of_the_shape(shape: Shape) -> None:
    row = layers(Arrangement(), shape)
    shared = shape.vocab * shape.hidden if shape.tied else 0
    assert sum(layer.parameters for layer in row) - shared == shape.parameters
    assert [layer.tied for layer in row if layer.tied] == (["words", "words"] if shape.tied else [])


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_products_have_all_operations_of_the_shape(shape: Shape) -> None:
    part = RankShare(1.0, 1, "none", False, 2)
    costs = TransformerCosts(shape, A100, DeviceEfficiency(), part)
    products = [*costs.matrix_products(), *costs.score_products()]
    head = 2 * shape.sequence * shape.hidden * shape.vocab
    assert 3 * (shape.layers * sum(each.flops for each in products) + head) == shape.flops


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_products_are_divided_among_shards(shards: int) -> None:
    parts = (RankShare(2.0, t, "none", False, 2) for t in (1, shards))
    whole, part = (TransformerCosts(GPT, A100, DeviceEfficiency(), each) for each in parts)
    for all_products, own in (
        (whole.matrix_products(), part.matrix_products()),
        (whole.score_products(), part.score_products()),
    ):
        assert sum(p.flops for p in all_products) == shards * sum(p.flops for p in own)


def test_more_shards_than_heads_of_keys_each_have_one() -> None:
    costs = TransformerCosts(LLAMA, A100, DeviceEfficiency(), RankShare(1.0, 8, "none", False, 2))
    assert costs.matrix_products()[0].n == 1024 // 8 + 2 * 64


# Equations 1 to 6 of 2205.05198, per block: b samples, t shards; exact, as all are whole numbers.


@pytest.mark.parametrize(("b", "t"), [(1, 1), (2, 2), (4, 8)])
def test_saved_bytes_without_recomputation(b: int, t: int) -> None:
    saved = block(micro_batch=b, shards=t).saved_bytes
    assert saved == S * b * H * (10 + 24 / t) + 5 * A * S * S * b / t


@pytest.mark.parametrize(("b", "t"), [(2, 2), (4, 8)])
def test_saved_bytes_with_the_sequence_divided(b: int, t: int) -> None:
    saved = block(micro_batch=b, shards=t, sequence_divided=True).saved_bytes
    assert saved == S * b * H / t * (34 + 5 * A * S / H)


def test_saved_bytes_with_selective_and_full_recomputation() -> None:
    assert block(micro_batch=2, recompute="selective").saved_bytes == 34 * S * 2 * H
    assert block(micro_batch=2, recompute="full").saved_bytes == 2 * S * 2 * H
    divided = block(micro_batch=2, shards=4, recompute="full", sequence_divided=True)
    assert divided.saved_bytes == 2 * S * 2 * H / 4


def test_flash_attention_saves_no_scores() -> None:
    assert block(DeviceEfficiency(), micro_batch=2).saved_bytes == 34 * S * 2 * H


def test_recomputation_makes_backward_longer_by_what_is_computed_again() -> None:
    fast = DeviceEfficiency(host_s=0.0, call_s=0.0, fused_scores=False)
    none, selective, full = (block(fast, micro_batch=8, recompute=r) for r in ("none", "selective", "full"))
    assert none.forward_s == selective.forward_s == full.forward_s
    assert none.backward_s == 2 * none.forward_s
    # Sums of the same numbers in another order.
    assert full.backward_s == pytest.approx(3 * none.forward_s, rel=1e-12)
    assert none.backward_s < selective.backward_s < full.backward_s
    assert full.working_bytes - none.working_bytes == none.saved_bytes


def test_a_small_block_takes_what_its_host_takes() -> None:
    tiny = DescribedWorkload(Shape(1, 64, 2, vocab=100, sequence=8), A100, 1, kernels=DeviceEfficiency(host_s=1e-3))
    made = tiny.layers(Arrangement())[1]
    # The device's microseconds are lost in its fourth power beside milliseconds.
    assert made.forward_s == pytest.approx(blocks.FORWARD_KERNELS * 1e-3, rel=1e-6)
    assert made.backward_s == pytest.approx(blocks.BACKWARD_KERNELS * 1e-3, rel=1e-6)
    assert made.idle_s == pytest.approx(70e-3, rel=0.01)


def test_collectives_hide_while_the_device_waits_for_its_host() -> None:
    slow, quick = DeviceEfficiency(host_s=1e-2), DeviceEfficiency(host_s=0.0, call_s=0.0)
    cluster = Cluster(1, 8, A100, Described(Links(300e9, 25e9)))
    waits = [
        cost(DescribedWorkload(GPT, A100, 8, kernels=kernels), cluster, Arrangement(shards=8)).terms["shards"]
        for kernels in (slow, quick)
    ]
    assert waits[0] == 0
    assert waits[1] > 0


def test_shards_sum_after_attention_and_after_the_mlp() -> None:
    size_bytes = 2 * S * H * 2
    made = block(micro_batch=2, shards=2)
    assert made.forward_calls == made.backward_calls == (Call("all_reduce", size_bytes),) * 2
    assert block(micro_batch=2, shards=2, recompute="full").backward_calls == (Call("all_reduce", size_bytes),) * 4
    divided = block(micro_batch=2, shards=2, sequence_divided=True)
    assert divided.forward_calls == (Call("all_gather", size_bytes), Call("reduce_scatter", size_bytes)) * 2
    assert block(micro_batch=2).forward_calls == ()


def test_full_precision_is_twice_the_bytes_but_for_masks() -> None:
    half, full = (
        DescribedWorkload(GPT, A100, 8, precision=precision, kernels=PLAIN).layers(Arrangement())[1]
        for precision in ("bf16-mixed", "fp32")
    )
    assert full.output_bytes == 2 * half.output_bytes
    masks = 2 * S * H + A * S * S
    assert full.saved_bytes - masks == 2 * (half.saved_bytes - masks)


@pytest.mark.parametrize(
    ("arranged", "message"),
    [
        ({"shards": 3}, "16 heads .* are not divisible by 3 shards"),
        ({"shards": 32}, "16 heads .* are not divisible by 32 shards"),
        ({"stages": 4, "chunks": 2}, "6 layers are fewer than 8 parts"),
    ],
)
def test_what_can_not_be_divided_so_is_refused(arranged: dict[str, int], message: str) -> None:
    refusal = DescribedWorkload(GPT, A100, 64).refusal(Arrangement(**arranged))  # type: ignore[arg-type]
    assert refusal is not None
    assert re.search(message, refusal)


def test_what_can_be_divided_is_not_refused() -> None:
    found = DescribedWorkload(GPT, A100, 64).refusal(Arrangement(stages=6, shards=8, sequence_divided=True))
    assert found is None


def test_a_twice_as_quick_device_takes_half_as_long_where_nothing_else_counts() -> None:
    bare = DeviceEfficiency(host_s=0.0, call_s=0.0, product_start_s=0.0, waits=0.0)
    one, two = (Device("", flops, 1e9, bandwidth) for flops, bandwidth in ((1e14, 1e12), (2e14, 2e12)))
    took = [DescribedWorkload(GPT, each, 8, kernels=bare).layers(Arrangement())[1].forward_s for each in (one, two)]
    assert took[0] == pytest.approx(2 * took[1], rel=1e-12)


def test_it_says_where_its_numbers_are_from() -> None:
    made = DescribedWorkload(GPT, A100, 64)
    assert made.spread == 0.37
    assert "nothing of it was measured" in made.provenance["layers' times"]
    assert made.name == "4x1024"
    assert made.flops == GPT.flops
