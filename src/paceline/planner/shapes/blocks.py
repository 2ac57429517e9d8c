"""The embedding, the blocks and the head of a transformer: their seconds, parameters and bytes on one device.

::

    b samples    t shards    s sequence    h hidden       a heads        k heads of keys
    d head size  f ffn       V vocab       e bytes of an element

A "word" is a token: b · s of them go through the model at a time. Seconds are the matrix products' (gemm_time.py) plus
the bytes read and written between them, or the host's time to start kernels where that is longer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from paceline.core.types import Seconds
from paceline.planner.base import Call, LayerCost
from paceline.planner.cluster import Device
from paceline.planner.shapes.gemm_time import DeviceEfficiency, Product, Products
from paceline.planner.shapes.shape import Shape

# Bytes that head and loss read and write for each logit: to full precision, maximum, exponents, sum, and back.
LOSS_BYTES = 36

# Kernels that a block starts in eager mode, as counted in Megatron's with fused masks and norms.
FORWARD_KERNELS, BACKWARD_KERNELS = 30, 40

# Shards for which call_s was measured; more shards count as this many, since there are no measurements of more.
WHOLE_HOST = 8

# Elements of two bytes: sizes of heads that are no multiple of it don't go well with tensor cores (NVIDIA's "Matrix
# Multiplication Background User's Guide").
ALIGNED, ALIGNED_BYTES = 8, 2

# The exponent of 2, 4, 8 and infinity that fits runs of Megatron-DeepSpeed best (benchmarks/planner).
SHARP = 4


@dataclass(frozen=True, slots=True)
class RankShare:
    """The share of a micro-batch that one worker computes, and how it computes it."""

    samples: float
    """b."""
    shards: int
    """t."""
    recompute: str
    sequence_divided: bool
    element_bytes: int
    """e."""
    scores_rate: float = 1.0
    """Rate of attention's products relative to the others: they stay at 16 bits where those use 8 or 4."""
    mask_bytes: int = 1
    """Bytes of dropout's mask for each element: on a CPU PyTorch keeps masks in the dtype of the activations."""
    cast_bytes: int = 0
    """Bytes written for each element that goes into a product, where it is cast to fewer bits first."""


@dataclass(frozen=True)
class TransformerCosts:
    """Costs of a transformer's layers on one worker.

    Args:
        shape: sizes of the model.
        device: of the worker.
        kernels: efficiency of the device.
        part: of a micro-batch, which the worker computes.
    """

    shape: Shape
    device: Device
    kernels: DeviceEfficiency
    part: RankShare

    def embedding(self) -> LayerCost:
        """Return the cost of the embedding: look up, add positions, dropout; backward adds to each word's row."""
        shape, part, e = self.shape, self.part, self.part.element_bytes
        pass_s = max(self._bytes_s(5 * e * self._outer), 6 * self.kernels.host_s)
        words = shape.vocab * shape.hidden
        parameters = round(words / part.shards) + shape.embedding_parameters - words
        saved_bytes = round(self._outer * (e + (0 if shape.gated else part.mask_bytes)))
        tied = "words" if shape.tied else ""
        return LayerCost("embedding", pass_s, pass_s, parameters, saved_bytes, round(self._outer * e), tied=tied)

    def head(self) -> LayerCost:
        """Return the cost of the head: a norm, a product with one column per word of the vocabulary, and the loss."""
        shape, kernels, part, e = self.shape, self.kernels, self.part, self.part.element_bytes
        logits = part.samples * shape.sequence * shape.vocab / part.shards
        product_s = self._products_s([Product(1, self._rows, max(1, shape.vocab // part.shards), shape.hidden)])
        bytes_s = self._bytes_s(LOSS_BYTES / 2 * logits + 6 * e * self._outer)
        host_s, copied = 15 * kernels.host_s, 0 if kernels.fused_loss else 4
        # Gradients of logits: backward of PyTorch's loss makes two in full precision; among shards four, of which it
        # has freed the logits it began with (torch.distributed.tensor.parallel.loss, in
        # _nll_loss_and_log_softmax_backward).
        gradients = (8 if part.shards == 1 else 12) - e if kernels.plain_loss else max(copied, e)
        words, tied = shape.vocab * shape.hidden, "words" if shape.tied else ""
        parameters = round(words / part.shards) + shape.head_parameters - words
        saved_bytes, working_bytes = round(logits * (e + copied) + 2 * e * self._outer), round(logits * gradients)
        passes_s = max(product_s + bytes_s, host_s), max(2 * product_s + bytes_s, host_s)
        return LayerCost("head", *passes_s, parameters, saved_bytes, 0, working_bytes, tied=tied)

    def block(self) -> LayerCost:
        """Return the cost of one block: attention and an MLP."""
        shape, kernels, part = self.shape, self.kernels, self.part
        scores_s = self._scores_s()
        others_s = self._products_s(self.matrix_products()) + self._bytes_s(self._between_bytes())
        forward_s = scores_s + others_s
        again_s = {"none": 0.0, "selective": others_s / 2 if kernels.every_second else scores_s, "full": forward_s}
        # Gradients of inputs and of weights: two products for each of forward's.
        backward_s = 2 * forward_s + again_s[part.recompute]
        calls, full = self._calls(), part.recompute == "full"
        # Hosts wait for each other at each collective; the third power is fitted (DeviceEfficiency.call_s).
        waits_s = len(calls) * kernels.call_s * min(1.0, part.shards / WHOLE_HOST) ** 3
        host_s = kernels.host_s * FORWARD_KERNELS + waits_s
        backward_host_s = kernels.host_s * BACKWARD_KERNELS + waits_s + (host_s if full else 0.0)
        saved_bytes, recomputed_bytes = self._activation_bytes()
        widest = 2 * shape.width * part.samples * shape.sequence / part.shards + 2 * self._outer
        output_bytes = round(self._outer * part.element_bytes)
        working_bytes = recomputed_bytes + round(part.element_bytes * widest)
        # Matrices are divided among shards; norms, and the biases that are added after a sum, are not.
        parameters = round(shape.matrices / part.shards) + shape.block_parameters - shape.matrices
        sizes = parameters, saved_bytes, output_bytes, working_bytes
        passes_s = _slower_s(forward_s, host_s), _slower_s(backward_s, backward_host_s)
        idle_s = max(0.0, host_s - forward_s) + max(0.0, backward_host_s - backward_s)
        return LayerCost("block", *passes_s, *sizes, calls, (calls if full else ()) + calls, idle_s=idle_s)

    def matrix_products(self) -> list[Product]:
        """List a block's forward products with weights: queries with keys and values, output, up (twice if gated),
        down."""
        shape, words, t, h = self.shape, self._rows, self.part.shards, self.shape.hidden
        inner, width = max(1, shape.inner // t), max(1, shape.width // t)
        # At least one key head each: with more shards than key heads these are copied.
        keys = max(shape.keys // t, shape.keys // (shape.kv_heads or shape.heads))
        attention = [Product(1, words, inner + 2 * keys, h), Product(1, words, h, inner)]
        return [*attention, Product(1, words, (2 if shape.gated else 1) * width, h), Product(1, words, h, width)]

    def score_products(self) -> list[Product]:
        """List a block's forward products of attention scores: queries by keys, then the scores by values."""
        batch = max(1, round(self.part.samples * self.shape.heads / self.part.shards))
        s, size = self.shape.sequence, self.shape.inner // self.shape.heads
        return [Product(batch, s, s, size), Product(batch, s, size, s)]

    @cached_property
    def _rows(self) -> int:
        """The number of words, b · s."""
        return max(1, round(self.part.samples * self.shape.sequence))

    @cached_property
    def _outer(self) -> float:
        """Elements of the activation that goes from block to block."""
        elements = self.part.samples * self.shape.sequence * self.shape.hidden
        return elements / (self.part.shards if self.part.sequence_divided else 1)

    def _scores_s(self) -> Seconds:
        """Return the forward seconds of the attention scores alone, which selective recomputation repeats.

        A softmax and dropout are read and written outside products, and its mask.
        """
        kernels, part = self.kernels, self.part
        written = 0.0 if kernels.fused_scores else self._score_bytes(4 * part.element_bytes + part.mask_bytes)
        rate = part.scores_rate * (kernels.scores if kernels.fused_scores else 1.0)
        if (self.shape.inner // self.shape.heads) % ALIGNED and part.element_bytes == ALIGNED_BYTES:
            rate *= kernels.unaligned
        return self._products_s(self.score_products()) / rate + self._bytes_s(written)

    def _score_bytes(self, each: int) -> float:
        """Return the bytes of all scores, of so many bytes each."""
        return each * self.part.samples * self.shape.heads * self.shape.sequence**2 / self.part.shards

    def _between_bytes(self) -> float:
        """Count a block's forward bytes in addition to products: norms, dropout and sums are b·s·h 14 times, then head
        layout and MLP activation."""
        shape, part = self.shape, self.part
        words = part.samples * shape.sequence
        divided = 3 * (shape.inner + 2 * shape.keys) + (3 if shape.gated else 2) * shape.width
        cast = part.cast_bytes * words * (2 * shape.hidden + (shape.inner + shape.width) / part.shards)
        return part.element_bytes * (14 * self._outer + words * divided / part.shards) + cast

    def _activation_bytes(self) -> tuple[int, int]:
        """Count the bytes that a block saves from forward to backward, and those that it computes again in backward.

        Saved are, with e = 2, ungated and t = 1, the 34·s·b·h + 5·a·s²·b of 2205.05198. Where every second product is
        kept: the input, queries, values, one of the MLP's, its last; and attention's output.
        """
        shape, kernels, part, e = self.shape, self.kernels, self.part, self.part.element_bytes
        words, masks = part.samples * shape.sequence, 0 if shape.gated else 2 * part.mask_bytes
        divided = 2 * shape.inner + 2 * shape.keys + (4 if shape.gated else 2) * shape.width
        plain = (4 * e + masks) * self._outer + e * words * divided / part.shards
        scores = 0.0 if kernels.fused_scores else self._score_bytes(2 * e + part.mask_bytes)
        whole = round(plain + scores)
        match part.recompute:
            case "full":
                return round(self._outer * e), whole
            case "selective" if kernels.every_second:
                kept = 2 * self._outer + words * (2 * shape.inner + shape.keys + shape.width) / part.shards
                return round(e * kept), whole - round(e * kept)
            case "selective":
                return round(plain), round(scores)
        return whole, 0

    def _calls(self) -> tuple[Call, ...]:
        """Return the forward collectives after attention and after the MLP; backward has as many of the same size
        (1909.08053, 2205.05198)."""
        part = self.part
        size_bytes = round(part.samples * self.shape.sequence * self.shape.hidden * part.element_bytes)
        if part.shards == 1:
            return ()
        if part.sequence_divided:
            return (Call("all_gather", size_bytes), Call("reduce_scatter", size_bytes)) * 2
        return (Call("all_reduce", size_bytes),) * 2

    def _products_s(self, products: Iterable[Product]) -> Seconds:
        """Return the seconds of the products, run one after the other."""
        kernels, device = self.kernels, self.device
        flops_per_s = kernels.products * device.flops_per_s
        rates = Products(flops_per_s, kernels.product_start_s, kernels.waits, device.multiprocessors)
        return sum(map(rates.seconds, products))

    def _bytes_s(self, size_bytes: float) -> Seconds:
        """Return the seconds to read and write the bytes."""
        return size_bytes / (self.kernels.bytes * self.device.memory_bytes_per_s)


def _slower_s(device_s: Seconds, host_s: Seconds) -> Seconds:
    """Return the slower of the two times, and somewhat more where they are alike, since each waits for the other now
    and then."""
    return float((device_s**SHARP + host_s**SHARP) ** (1 / SHARP))
