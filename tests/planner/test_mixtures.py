"""Mixtures of experts: their sizes are those that were published, and what sending tokens to experts adds."""

from dataclasses import replace

import pytest

from paceline.clock.cluster_file import Links
from paceline.planner.base import Arrangement
from paceline.planner.calibration.corrections import Case, Corrections, predicted
from paceline.planner.calibration.mixtures import MIXTURES, Experts, MixtureWorkload, mixture
from paceline.planner.devices import device
from paceline.planner.shapes.shape import Shape
from paceline.planner.shapes.shape_file import DescribedWorkload
from tests.planner.published_rows import row

LINKS = Links(450e9, 50e9, 0.0, 0.0)
BLOCKS = Shape(2, 1024, 8, 1, 1000, 512, tied=False, gated=True, positions=False)
EIGHT = Experts(8, 2, 256)

# Billions of parameters, all and active, as their authors round them.
PUBLISHED = {
    "deepseekv3": (671, 37),
    "kimi_k2": (1040, 32),
    "gpt oss 120b": (116.8, 5.1),
    "gpt oss 20b": (20.9, 3.6),
    "qwen3_30b": (30.5, 3.3),
    "qwen3_235b": (235, 22),
    "mixtral_8x7b": (46.7, 12.9),
    "mixtral_8x22b": (141, 39),
    "nemotron_3_nano": (31.6, 3.2),
    "nemotron_3_super": (120, 12),
}


def workload(shape: Shape = BLOCKS, experts: Experts = EIGHT, per_host: int = 8) -> MixtureWorkload:
    return MixtureWorkload(DescribedWorkload(shape, device("H100-80GB"), 8), experts, LINKS, per_host)


@pytest.mark.parametrize("name", MIXTURES)
def test_sizes_make_up_the_published_parameters(name: str) -> None:
    shape, experts = MIXTURES[name]
    found = workload(shape, experts)
    every, active = PUBLISHED[name]
    # Layers that differ from the others, and attention with latent keys, are left out of the shapes.
    assert shape.parameters + found.expert_parameters(1) == pytest.approx(every * 1e9, rel=0.12)
    chosen = found.expert_parameters(1) * experts.chosen / experts.number
    embedding = shape.vocab * shape.hidden  # some authors count it, others don't
    assert active * 0.85e9 - embedding < shape.parameters + chosen - embedding < active * 1.15e9 + embedding


def test_one_expert_that_all_tokens_pass_is_the_mlp() -> None:
    dense = replace(BLOCKS, ffn=256)
    mixed = workload(experts=Experts(1, 1, 256))
    assert mixed.flops == pytest.approx(dense.flops, rel=0.01)
    own = sum(layer.parameters for layer in mixed.layers(Arrangement()))
    assert own == pytest.approx(dense.parameters, rel=0.01)


def test_a_worker_has_its_part_of_the_experts() -> None:
    sizes = [workload().layers(Arrangement(8, experts=ways))[1].parameters for ways in (1, 2, 8)]
    assert sizes[0] - sizes[1] == 4 * 3 * 1024 * 256
    assert sizes[1] - sizes[2] == 3 * 3 * 1024 * 256


@pytest.mark.parametrize(("chosen", "sent"), [(1, 1.0), (2, 2 - 1 / 8), (1000, 8.0)])
def test_a_token_is_sent_once_to_each_worker_that_has_one_of_its_experts(chosen: int, sent: float) -> None:
    """Of 8 workers, 7 are others; twice forward, to experts and back, and twice backward."""
    alone, apart = (
        workload(experts=Experts(64, chosen, 64)).layers(Arrangement(8, experts=ways))[1] for ways in (1, 8)
    )
    faster = MixtureWorkload(workload().blocks, Experts(64, chosen, 64), Links(1e30, 1e30, 0.0, 0.0), 8).layers(
        Arrangement(8, experts=8)
    )[1]
    added_s = apart.forward_s - faster.forward_s
    assert added_s == pytest.approx(2 * 2 * 512 * 1024 * sent * 7 / 8 / LINKS.inside_bytes_per_s, rel=1e-6)
    assert apart.backward_s - faster.backward_s == pytest.approx(added_s)
    assert alone.output_bytes == apart.output_bytes


def test_tokens_to_other_hosts_take_the_links_between() -> None:
    inside, across = (workload(per_host=per_host).layers(Arrangement(8, experts=8))[1].forward_s for per_host in (8, 2))
    # To 4 hosts, of which 3 are others, at the chance that one of two experts is there; a ninth of the bandwidth.
    hosts = 4 * (1 - (3 / 4) ** 2)
    between_s = 2 * 2 * 512 * 1024 * hosts * 3 / 4 / LINKS.between_bytes_per_s
    assert 0.5 * between_s < across - inside < between_s


ROW = {"model": "Qwen3_30B_a3B", "hw": "DGX-H100", "framework": "NeMo", "seq": 4096, "n_devices": 16, "dp": 16,
       "precision": "bf16", "layers": "", "hidden": "", "recompute": "none", "mbs": 1, "gbs": 64}  # fmt: skip


def test_a_row_of_a_known_mixture_has_a_case_and_another_has_none() -> None:
    known = Case.of(row("a", **ROW, ep=8))
    assert known is not None
    assert known.experts is not None
    few, many = (Case.of(row("a", **ROW, ep=ways)) for ways in (1, 16))
    assert few is not None
    assert many is not None
    assert predicted(few, Corrections()).peak.parameters > 4 * predicted(many, Corrections()).peak.parameters
    assert Case.of(row("a", **ROW | {"model": "Newest_90B_a9B"})) is None
    assert mixture(row("a", **ROW | {"seq": ""})) is None


def test_fewer_replicas_divide_the_state_of_experts() -> None:
    shared, own, whole = (Case.of(row("a", **ROW, ep=ways, zero=zero)) for ways, zero in ((8, 1), (16, 1), (8, 0)))
    for case in (shared, own, whole):
        assert case is not None
        a, work = case.arrangement, case.workload
        assert isinstance(work, MixtureWorkload)
        # Experts are with replicas / ways of them; 1 / replicas is counted already.
        each = case.numerics.optimizer * work.expert_parameters(a.experts)
        extra = each * (a.experts - 1) / 16 if a.divided else 0.0
        assert case.experts_optimizer_bytes == pytest.approx(extra)
