"""What rows say by their framework, device and name, where their columns say nothing."""

import pytest
import torch

from paceline.planner.base import Arrangement
from paceline.planner.calibration import row_shapes
from paceline.planner.calibration.corrections import Case
from paceline.planner.calibration.rows import PublishedRow
from paceline.planner.devices import device
from paceline.planner.shapes.blocks import RankShare, TransformerCosts
from paceline.planner.shapes.gemm_time import DeviceEfficiency
from paceline.planner.shapes.shape import Shape
from tests.planner.published_rows import row

PIPELINE = {"framework": "torchtitan (FSDP2)", "hw": "H100", "precision": "bf16", "zero": 3, "layers": 8, "hidden": 512}
TINY = Shape(4, 256, 4, vocab=1000, sequence=128)


def test_torchtitan_makes_as_many_micro_batches_as_stages() -> None:
    found = row_shapes.arrangement(row("a", **PIPELINE, n_devices=8, dp=2, tp=1, pp=4, gbs=64))
    assert (found.micro_batch, found.micro_batches) == (8, 4)
    plain = row_shapes.arrangement(row("a", n_devices=8, dp=2, tp=1, pp=4, gbs=64, layers=8, hidden=512))
    assert (plain.micro_batch, plain.micro_batches) == (1, 32)


def test_with_stages_torchtitan_keeps_parameters_and_gradients_whole() -> None:
    sizes = {"n_devices": 8, "tp": 1, "gbs": 64, "mbs": 1}
    staged, flat = Case.of(row("a", **PIPELINE, **sizes, dp=2, pp=4)), Case.of(row("a", **PIPELINE, **sizes, dp=8))
    assert staged is not None
    assert flat is not None
    assert (staged.arrangement.divided, flat.arrangement.divided) == (1, 3)
    # Both have 16 bytes of each parameter divided; the other six, in half and in full, whole where there are stages.
    assert (staged.numerics.parameter + staged.numerics.gradient, staged.numerics.optimizer) == (6, 16)
    assert flat.numerics.total == 16


@pytest.mark.parametrize(("replicas", "laid_out"), [(1, 0.0), (8, 1.0)])
def test_deepspeed_lays_gradients_out_once_more_to_sum_them(replicas: int, laid_out: float) -> None:
    asked = row("a", n_params=1e8, n_devices=replicas, dp=replicas, precision="fp32")
    found = row_shapes.numerics(asked, row_shapes.arrangement(asked))
    assert found.optimizer == 8 + 4 * laid_out
    larger = row("a", n_params=1e9, n_devices=replicas, dp=replicas, precision="fp32")
    half = row_shapes.numerics(larger, row_shapes.arrangement(larger))
    assert half.optimizer == 8 + 4 * laid_out / 2


@pytest.mark.parametrize(("devices", "shards"), [(96, 8), (576, 8), (12, 4)])
def test_where_nothing_says_how_it_was_divided_no_device_is_left_out(devices: int, shards: int) -> None:
    asked = row("a", n_params=177e9, n_devices=devices, layers=96, hidden=12288, gbs=1152)
    found = row_shapes.arrangement(asked)
    assert found.workers == devices
    assert found.shards == shards


@pytest.mark.parametrize("many", [18e9, 39e9, 52e9, 340e9])
def test_a_model_without_layers_has_as_many_parameters_as_it_is_said_to(many: float) -> None:
    for told in ({"n_params": many, "model": "m"}, {"model": f"m-{many / 1e9:.0f}B"}):
        found = row_shapes.shape(row("a", **told, layers="", hidden="", heads="", ffn=""))
        assert found is not None
        # Half a layer of the widest is 1 %; the words' matrix of the smallest 2 %.
        assert found.parameters == pytest.approx(many, rel=0.03)


def test_a_mixture_of_experts_has_no_shape() -> None:
    for told in ({"model": "Qwen9_235B_a22B"}, {"model": "new-100B", "ep": 8}, {"model": "Mixtral 8x7B"}):
        assert row_shapes.shape(row("a", **told, layers="", hidden="", heads="", ffn="")) is None


def test_devices_that_flash_attention_is_not_made_for_write_scores() -> None:
    told = {"framework": "HF+DeepSpeed ZeRO", "precision": "fp16"}
    assert not row_shapes.kernels(row("a", hw="V100-32GB", **told)).fused_scores
    assert row_shapes.kernels(row("a", hw="A100-80GB", **told)).fused_scores


def test_a_row_at_8_bits_has_the_rate_of_16_beside() -> None:
    asked = row("a", hw="DGX-H100", peak_tflops="", precision="fp8")
    assert row_shapes.device(asked).flops_per_s == 2 * row_shapes.plain_flops_per_s(asked) == 1979e12


def test_a_cpus_masks_are_kept_as_pytorch_keeps_them() -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.nn.functional.dropout(torch.ones(8, requires_grad=True), 0.1)
    kept = sum(each.nbytes for each in saved)
    plain, masked = (_saved_bytes(mask_bytes) for mask_bytes in (1, kept // 8))
    # Two masks of b·s·h, and one of scores, of a·s² for each sample.
    elements = TINY.sequence * (2 * TINY.hidden + TINY.heads * TINY.sequence)
    assert masked - plain == elements * (kept // 8 - 1)


def _saved_bytes(mask_bytes: int) -> int:
    part = RankShare(1, 1, "none", sequence_divided=False, element_bytes=4, mask_bytes=mask_bytes)
    return (
        TransformerCosts(TINY, device("CPU-core", "fp32"), DeviceEfficiency(fused_scores=False), part)
        .block()
        .saved_bytes
    )


@pytest.mark.parametrize("shards", [1, 4])
def test_a_loss_holds_what_pytorchs_makes_of_logits(shards: int) -> None:
    part = RankShare(1, shards, "none", sequence_divided=False, element_bytes=2)
    found = TransformerCosts(TINY, device("A100-80GB"), DeviceEfficiency(plain_loss=True), part).head()
    logits = TINY.sequence * TINY.vocab / shards
    # 12 bytes of each, and 16 among shards: what is saved, a gradient, and what is computed from both.
    outer = 2 * 2 * TINY.sequence * TINY.hidden
    assert found.saved_bytes + found.working_bytes - outer == logits * (12 if shards == 1 else 16)


def test_every_second_product_is_kept_where_selection_is_by_products() -> None:
    parts = {
        how: RankShare(1, 1, how, sequence_divided=False, element_bytes=2) for how in ("none", "selective", "full")
    }
    kernels, where = DeviceEfficiency(every_second=True), device("A100-80GB")
    gated = Shape(4, 256, 4, vocab=1000, sequence=128, gated=True)
    found = {how: TransformerCosts(gated, where, kernels, part).block() for how, part in parts.items()}
    assert found["full"].saved_bytes < found["selective"].saved_bytes < 0.7 * found["none"].saved_bytes
    assert found["none"].backward_s < found["selective"].backward_s < found["full"].backward_s


def test_more_chunks_than_layers_are_as_many_as_layers() -> None:
    found = row_shapes.arrangement(
        row("a", layers=8, hidden=512, n_devices=4, dp=1, tp=1, pp=4, vpp=1000, gbs=8, mbs=1)
    )
    assert isinstance(found, Arrangement)
    assert found.chunks == 2


def test_words_of_a_table_that_are_mixed_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"row a: layers = '-2' is not from 0 to 10000; write what it was"):
        PublishedRow({"row_id": "a", "layers": "-2"}).number("layers")
