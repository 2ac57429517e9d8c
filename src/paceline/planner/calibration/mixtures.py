"""Mixtures of experts of published rows: blocks of a transformer, of which the MLP is experts that tokens are sent to.

Rows give such a model's name alone, so its sizes are looked up (:data:`MIXTURES`). For each block and w tokens of a
micro-batch, with k of E experts chosen for each token, of which a worker has E / e, the added forward is::

    products     E / e experts, each w · k · e / E tokens by its two or three matrices
    bytes        tokens are laid out by worker, then by expert, and back: each time all w · k are read and written
    messages     w · k tokens of h elements to other workers and back (all-to-all), by links inside a host and between
    host         kernels of the router, of the layouts, of the experts

Backward does all of it twice, but messages once. Sources: GShard (2006.16668), Megablocks (2211.15841) for the layouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from paceline.clock.cluster_file import Links
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, LayerCost, Workload
from paceline.planner.calibration.rows import PublishedRow
from paceline.planner.shapes.gemm_time import Product, Products
from paceline.planner.shapes.shape import Shape
from paceline.planner.shapes.shape_file import DescribedWorkload

# Kernels of the router, the layouts and the experts of a block, forward and backward, as in Megatron-Core's.
FORWARD_KERNELS, BACKWARD_KERNELS = 30, 45
# Times that the w · k tokens of h elements are read or written forward: into the order of workers, out of that of
# messages into that of experts, back, and summed for each token.
LAYOUTS = 8


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a block.

    Args:
        number: E.
        chosen: k, of each token.
        width: of the MLP of one of them.
        gated: whether it has a third matrix.
        latent: h, elements of a token that are sent; 0: the model's hidden.
    """

    number: int
    chosen: int
    width: int
    gated: bool = True
    latent: int = 0


def _gpt(layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, shared: int, size: int = 128) -> Shape:
    """Return the blocks without experts: attention and the MLP of all tokens, which is one wide where there is none."""
    sizes = {"kv_heads": kv_heads, "head_size": size, "tied": False, "gated": True, "positions": False}
    return Shape(layers, hidden, heads, shared or 1, vocab, **sizes)  # type: ignore[arg-type]


# Part of a model's name -> its sizes, by the reports and the published configurations of DeepSeek-V3 (2412.19437; its
# latent attention counts as heads of 128 with one of keys), Kimi K2 (2507.20534), gpt-oss (2508.10925), Qwen3
# (2505.09388), Mixtral (2401.04088) and Nemotron 3 (2512.20848; a Mamba layer or attention, with experts, counts as a
# block, and the MLP of all tokens is as wide as makes up the parameters that are active). The first match counts.
MIXTURES: Mapping[str, tuple[Shape, Experts]] = {
    "deepseekv3": (_gpt(61, 7168, 128, 1, 129280, 2048), Experts(256, 8, 2048)),
    "kimi_k2": (_gpt(61, 7168, 64, 1, 163840, 2048), Experts(384, 8, 2048)),
    "gpt oss 120b": (_gpt(36, 2880, 64, 8, 201088, 0, 64), Experts(128, 4, 2880)),
    "gpt oss 20b": (_gpt(24, 2880, 64, 8, 201088, 0, 64), Experts(32, 4, 2880)),
    "qwen3_30b": (_gpt(48, 2048, 32, 4, 151936, 0), Experts(128, 8, 768)),
    "qwen3_235b": (_gpt(94, 4096, 64, 4, 151936, 0), Experts(128, 8, 1536)),
    "mixtral_8x7b": (_gpt(32, 4096, 32, 8, 32000, 0), Experts(8, 2, 14336)),
    "mixtral_8x22b": (_gpt(56, 6144, 48, 8, 32768, 0), Experts(8, 2, 16384)),
    "nemotron_3_nano": (_gpt(26, 2688, 32, 2, 131072, 2475), Experts(128, 6, 1856, gated=False)),
    "nemotron_3_super": (_gpt(44, 4096, 64, 2, 131072, 3584), Experts(512, 22, 2688, gated=False, latent=1024)),
}


def mixture(row: PublishedRow) -> tuple[Shape, Experts] | None:
    """Return the blocks and the experts of a row's model; None: it is no mixture, or its sizes are not known."""
    name = row.model.lower()
    found = next((sizes for part, sizes in MIXTURES.items() if part in name), None)
    if found is None or not row.number("seq"):
        return None
    return replace(found[0], sequence=row.whole("seq", 1), name=row.model), found[1]


@final
@dataclass(frozen=True)
class MixtureWorkload(Workload):
    """Blocks with experts in addition.

    Args:
        blocks: without the experts.
        experts: of each block.
        links: that tokens are sent by, as corrected.
        per_host: devices of a host.
    """

    blocks: DescribedWorkload
    experts: Experts
    links: Links
    per_host: int

    def __post_init__(self) -> None:
        for name in ("name", "global_batch", "numerics", "provenance", "spread"):
            object.__setattr__(self, name, getattr(self.blocks, name))

    @property
    def flops(self) -> float:  # type: ignore[override]
        """Operations of a sample, of the experts those that are chosen."""
        shape, sizes = self.blocks.shape, self.experts
        matrices = sizes.chosen * self._expert_elements
        return self.blocks.flops + 6.0 * shape.sequence * shape.layers * matrices

    def refusal(self, arrangement: Arrangement) -> str | None:
        return self.blocks.refusal(arrangement)

    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        embedding, *blocks, head = self.blocks.layers(arrangement)
        whole = self._with_experts(blocks[0], arrangement)
        return (embedding, *(whole,) * len(blocks), head)

    def expert_parameters(self, ways: int) -> float:
        """Return the parameters of the experts of all blocks on a worker, where so many workers have all of them."""
        return self.blocks.shape.layers * self.experts.number / ways * self._expert_elements

    @property
    def _expert_elements(self) -> int:
        return (3 if self.experts.gated else 2) * self._elements * self.experts.width

    @property
    def _elements(self) -> int:
        return self.experts.latent or self.blocks.shape.hidden

    def _with_experts(self, block: LayerCost, a: Arrangement) -> LayerCost:
        """Return a block with its experts: their time and what they hold; a worker has E / e of them."""
        sizes, kernels = self.experts, self.blocks.kernels
        ways, divided = min(a.experts, sizes.number), a.shards if a.sequence_divided else 1
        tokens = a.micro_batch / a.context * self.blocks.shape.sequence / divided * sizes.chosen
        products_s = self._products_s(tokens, max(1, sizes.number // ways))
        moved = tokens * (LAYOUTS * self._elements + (4 if sizes.gated else 3) * sizes.width)
        element_bytes, bandwidth = 2, kernels.bytes * self.blocks.device.memory_bytes_per_s
        device_s = products_s + element_bytes * moved / bandwidth
        sent_s = 2 * self._sent_s(element_bytes * tokens / sizes.chosen * self._elements, ways)
        forward_s = max(device_s, FORWARD_KERNELS * kernels.host_s) + sent_s
        backward_s = max(2 * device_s, BACKWARD_KERNELS * kernels.host_s) + sent_s
        again_s = forward_s if a.recompute == "full" else 0.0
        saved = round(element_bytes * tokens * (2 * self._elements + (4 if sizes.gated else 2) * sizes.width))
        return replace(
            block,
            forward_s=block.forward_s + forward_s,
            backward_s=block.backward_s + backward_s + again_s,
            parameters=block.parameters + round(sizes.number / ways * self._expert_elements),
            saved_bytes=block.saved_bytes + (0 if a.recompute == "full" else saved),
        )

    def _products_s(self, tokens: float, own: int) -> Seconds:
        """Return the forward seconds of the experts' products on one worker, which has so many of them."""
        sizes, kernels, device = self.experts, self.blocks.kernels, self.blocks.device
        rates = Products(
            kernels.products * device.flops_per_s, kernels.product_start_s, kernels.waits, device.multiprocessors
        )
        each = max(1, round(tokens / own))
        inner = (2 if sizes.gated else 1) * sizes.width
        up, down = Product(own, each, inner, self._elements), Product(own, each, self._elements, sizes.width)
        return rates.seconds(up) + rates.seconds(down)

    def _sent_s(self, size_bytes: float, ways: int) -> Seconds:
        """Return the seconds of one all-to-all of all tokens, of so many bytes each once.

        A token is sent once to each host that has one of its experts, and there once to each such worker.
        """
        links, inside = self.links, min(ways, self.per_host)
        workers, hosts = _distinct(ways, self.experts.chosen), _distinct(ways / inside, self.experts.chosen)
        result = size_bytes * workers * (inside - 1) / inside / links.inside_bytes_per_s + links.latency_s
        if ways > inside:
            result += size_bytes * hosts * (1 - inside / ways) / links.between_bytes_per_s + links.between_latency_s
        return result if ways > 1 else 0.0


def _distinct(places: float, drawn: int) -> float:
    """Return the expected number of different places among so many that are drawn alike: n (1 - (1 - 1/n)ᵏ)."""
    return places * (1 - (1 - 1 / places) ** drawn)
