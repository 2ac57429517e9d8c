"""The embedding, the blocks and the head of a transformer: their seconds, parameters and bytes on one device.

::

    b samples    t shards    s sequence    h hidden       a heads        k heads of keys
    d head size  f ffn       V vocab       e bytes of an element

A "word" is a token: b · s of them go through the model at a time. Seconds are the matrix products' (gemm_time.py) plus
the bytes read and written between them, or the host's time to start kernels where that is longer.
"""

from collections.abc import Iterable

from paceline.core.types import Seconds
from paceline.planner.base import Call, LayerCost
from paceline.planner.cluster import Device
from paceline.planner.shapes.gemm_time import DeviceEfficiency, Product, Products, RankShare, product_s
from paceline.planner.shapes.shape import Shape

LOSS_BYTES = 36
"""Bytes that head and loss read and write for each logit: to full precision, maximum, exponents, sum, and back."""


def embedding(shape: Shape, device: Device, kernels: DeviceEfficiency, part: RankShare) -> LayerCost:
    """Return the cost of the embedding: look up, add positions, dropout; backward adds to each word's row."""
    elements = outer_elements(shape, part)
    once_s = bytes_s(5 * part.element_bytes * elements, device, kernels)
    words = round(shape.vocab * shape.hidden / part.shards)
    return LayerCost(
        "embedding",
        max(once_s, 6 * kernels.host_s),
        max(once_s, 6 * kernels.host_s),
        parameters=words + (shape.embedding_parameters - shape.vocab * shape.hidden),
        saved_bytes=round(elements * (part.element_bytes + (0 if shape.gated else part.mask_bytes))),
        output_bytes=round(elements * part.element_bytes),
        tied="words" if shape.tied else "",
    )


def head(shape: Shape, device: Device, kernels: DeviceEfficiency, part: RankShare) -> LayerCost:
    """Return the cost of the head: a norm, a product with one column per word of the vocabulary, and the loss."""
    words, logits = words_of(shape, part), part.samples * shape.sequence * shape.vocab / part.shards
    product = Product(1, words, max(1, shape.vocab // part.shards), shape.hidden)
    once_s = products_s([product], device, kernels)
    bytes_each_s = bytes_s(
        LOSS_BYTES / 2 * logits + 6 * part.element_bytes * outer_elements(shape, part), device, kernels
    )
    host_s, copied = 15 * kernels.host_s, 0 if kernels.fused_loss else 4
    return LayerCost(
        "head",
        max(once_s + bytes_each_s, host_s),
        max(2 * once_s + bytes_each_s, host_s),
        parameters=round(shape.vocab * shape.hidden / part.shards) + shape.head_parameters - shape.vocab * shape.hidden,
        saved_bytes=round(
            logits * (part.element_bytes + copied) + 2 * part.element_bytes * outer_elements(shape, part)
        ),
        output_bytes=0,
        working_bytes=round(logits * loss_working_bytes(kernels, part)),
        tied="words" if shape.tied else "",
    )


def loss_working_bytes(kernels: DeviceEfficiency, part: RankShare) -> int:
    """Return the bytes per logit that the backward pass of the loss needs in addition to saved ones: gradients.

    PyTorch's makes two in full precision; among shards four, of which it has freed the logits it began with
    (torch.distributed.tensor.parallel.loss, ``_nll_loss_and_log_softmax_backward``).
    """
    if kernels.plain_loss:
        return (8 if part.shards == 1 else 12) - part.element_bytes
    return max(0 if kernels.fused_loss else 4, part.element_bytes)


FORWARD_KERNELS, BACKWARD_KERNELS = 30, 40
"""Kernels that a block starts in eager mode, as counted in Megatron's with fused masks and norms."""


def block(shape: Shape, device: Device, kernels: DeviceEfficiency, part: RankShare) -> LayerCost:
    """Return the cost of one block: attention and an MLP."""
    scores_s, others_s = attention_s(shape, device, kernels, part), between_s(shape, device, kernels, part)
    forward_s = scores_s + others_s
    again_s = {"none": 0.0, "selective": others_s / 2 if kernels.every_second else scores_s, "full": forward_s}
    calls = block_calls(shape, part)
    host_s, backward_host_s = hosts_s(kernels, part, len(calls))
    # gradients of inputs and of weights: two products for each of forward's
    backward_s = 2 * forward_s + again_s[part.recompute]
    return LayerCost(
        "block",
        slower_s(forward_s, host_s),
        slower_s(backward_s, backward_host_s),
        parameters=block_parameters(shape, part),
        saved_bytes=saved_bytes(shape, kernels, part),
        output_bytes=round(outer_elements(shape, part) * part.element_bytes),
        working_bytes=working_bytes(shape, kernels, part),
        forward_calls=calls,
        backward_calls=(calls if part.recompute == "full" else ()) + calls,
        idle_s=max(0.0, host_s - forward_s) + max(0.0, backward_host_s - backward_s),
    )


def attention_s(shape: Shape, device: Device, kernels: DeviceEfficiency, part: RankShare) -> Seconds:
    """Return the forward seconds of the attention scores alone, which selective recomputation repeats."""
    written = bytes_s(score_bytes(shape, kernels, part), device, kernels)
    rate = part.scores_rate * (kernels.scores if kernels.fused_scores else 1.0)
    if (shape.inner // shape.heads) % ALIGNED and part.element_bytes == ALIGNED_BYTES:
        rate *= kernels.unaligned
    return products_s(score_products(shape, part), device, kernels) / rate + written


ALIGNED, ALIGNED_BYTES = 8, 2
"""Elements of two bytes: sizes of heads that are no multiple of it don't go well with tensor cores (NVIDIA's "Matrix
Multiplication Background User's Guide")."""


def between_s(shape: Shape, device: Device, kernels: DeviceEfficiency, part: RankShare) -> Seconds:
    """Return the forward seconds of the products with weights and of the operators between them."""
    products = products_s(matrix_products(shape, part), device, kernels)
    return products + bytes_s(between_bytes(shape, part), device, kernels)


def hosts_s(kernels: DeviceEfficiency, part: RankShare, calls: int) -> tuple[Seconds, Seconds]:
    """Return the host's seconds to start the kernels, forward and backward including recomputation."""
    # the third power is fitted (DeviceEfficiency.call_s)
    waits = calls * kernels.call_s * min(1.0, part.shards / WHOLE_HOST) ** 3
    forward_s = kernels.host_s * FORWARD_KERNELS + waits
    again_s = forward_s if part.recompute == "full" else 0.0
    return forward_s, kernels.host_s * BACKWARD_KERNELS + waits + again_s


WHOLE_HOST = 8
"""Shards for which ``call_s`` was measured; more shards count as this many, since there are no measurements of more."""


def slower_s(device_s: Seconds, host_s: Seconds) -> Seconds:
    """Return the slower of the two times, and somewhat more where they are alike, since each waits for the other now
    and then."""
    return float((device_s**SHARP + host_s**SHARP) ** (1 / SHARP))


SHARP = 4
"""The exponent of 2, 4, 8 and infinity that fits runs of Megatron-DeepSpeed best (benchmarks/planner)."""


def matrix_products(shape: Shape, part: RankShare) -> list[Product]:
    """List the forward products with weights: queries with keys and values, output, up (twice if gated), down."""
    words, t, h = words_of(shape, part), part.shards, shape.hidden
    inner, width = max(1, shape.inner // t), max(1, shape.width // t)
    # at least one key head each: with more shards than key heads these are copied
    keys = max(shape.keys // t, shape.keys // (shape.kv_heads or shape.heads))
    attention = [Product(1, words, inner + 2 * keys, h), Product(1, words, h, inner)]
    return [*attention, Product(1, words, (2 if shape.gated else 1) * width, h), Product(1, words, h, width)]


def score_products(shape: Shape, part: RankShare) -> list[Product]:
    """List the forward products of attention scores: queries by keys, then the scores by values."""
    batch = max(1, round(part.samples * shape.heads / part.shards))
    size = shape.inner // shape.heads
    return [Product(batch, shape.sequence, shape.sequence, size), Product(batch, shape.sequence, size, shape.sequence)]


def products_s(products: Iterable[Product], device: Device, kernels: DeviceEfficiency) -> Seconds:
    """Return the seconds of the products, run one after the other."""
    rates = Products(
        kernels.products * device.flops_per_s, kernels.product_start_s, kernels.waits, device.multiprocessors
    )
    return sum(product_s(*each, rates) for each in products)


def bytes_s(size_bytes: float, device: Device, kernels: DeviceEfficiency) -> Seconds:
    """Return the seconds to read and write the bytes."""
    return size_bytes / (kernels.bytes * device.memory_bytes_per_s)


def words_of(shape: Shape, part: RankShare) -> int:
    """Return the number of words, b · s."""
    return max(1, round(part.samples * shape.sequence))


def outer_elements(shape: Shape, part: RankShare) -> float:
    """Count the elements of the activation that goes from block to block."""
    return part.samples * shape.sequence * shape.hidden / part.outer


def between_bytes(shape: Shape, part: RankShare) -> float:
    """Count the forward bytes in addition to products: norms, dropout and sums are b·s·h 14 times, then head layout and
    MLP activation."""
    words, e = part.samples * shape.sequence, part.element_bytes
    divided = 3 * (shape.inner + 2 * shape.keys) + (3 if shape.gated else 2) * shape.width
    cast = part.cast_bytes * words * (2 * shape.hidden + (shape.inner + shape.width) / part.shards)
    return e * (14 * outer_elements(shape, part) + words * divided / part.shards) + cast


def score_bytes(shape: Shape, kernels: DeviceEfficiency, part: RankShare) -> float:
    """Count the forward bytes of the scores outside products: a softmax and dropout, each read and written, and its
    mask."""
    if kernels.fused_scores:
        return 0.0
    return (4 * part.element_bytes + part.mask_bytes) * part.samples * shape.heads * shape.sequence**2 / part.shards


def block_calls(shape: Shape, part: RankShare) -> tuple[Call, ...]:
    """Return the forward collectives after attention and after the MLP; backward has as many of the same size
    (1909.08053, 2205.05198)."""
    if part.shards == 1:
        return ()
    size_bytes = round(part.samples * shape.sequence * shape.hidden * part.element_bytes)
    if part.sequence_divided:
        return (Call("all_gather", size_bytes), Call("reduce_scatter", size_bytes)) * 2
    return (Call("all_reduce", size_bytes),) * 2


def block_parameters(shape: Shape, part: RankShare) -> int:
    """Count the parameters of one shard: matrices are divided, norms and the biases added after a sum are not."""
    whole = shape.block_parameters - shape.matrices
    return round(shape.matrices / part.shards) + whole


def saved_bytes(shape: Shape, kernels: DeviceEfficiency, part: RankShare) -> int:
    """Count the bytes saved from forward to backward: with e = 2, ungated and t = 1 the 34·s·b·h + 5·a·s²·b of
    2205.05198."""
    if part.recompute == "full":
        return round(outer_elements(shape, part) * part.element_bytes)
    if part.recompute == "selective" and kernels.every_second:
        return kept_bytes(shape, part)
    return whole_bytes(shape, kernels, part, scores=part.recompute == "none")


def kept_bytes(shape: Shape, part: RankShare) -> int:
    """Count the bytes kept when every second product is: the input, queries, values, one of the MLP's, its last; and
    attention's output."""
    words = part.samples * shape.sequence
    divided = words * (2 * shape.inner + shape.keys + shape.width) / part.shards
    return round(part.element_bytes * (2 * outer_elements(shape, part) + divided))


def whole_bytes(shape: Shape, kernels: DeviceEfficiency, part: RankShare, *, scores: bool) -> int:
    """Count the bytes that a block saves without recomputation."""
    e, words = part.element_bytes, part.samples * shape.sequence
    masks = 0 if shape.gated else 2 * part.mask_bytes
    size_bytes = (4 * e + masks) * outer_elements(shape, part)
    size_bytes += e * words * (2 * shape.inner + 2 * shape.keys + (4 if shape.gated else 2) * shape.width) / part.shards
    if scores and not kernels.fused_scores:
        size_bytes += (2 * e + part.mask_bytes) * part.samples * shape.heads * shape.sequence**2 / part.shards
    return round(size_bytes)


def working_bytes(shape: Shape, kernels: DeviceEfficiency, part: RankShare) -> int:
    """Count the bytes in use during a block's backward pass: recomputed activations, and gradients of its widest
    ones."""
    again = {"none": 0, "selective": 0, "full": whole_bytes(shape, kernels, part, scores=True)}[part.recompute]
    scores = part.samples * shape.heads * shape.sequence**2 / part.shards
    if part.recompute == "selective" and kernels.every_second:
        again = whole_bytes(shape, kernels, part, scores=True) - kept_bytes(shape, part)
    elif part.recompute == "selective" and not kernels.fused_scores:
        again = round((2 * part.element_bytes + part.mask_bytes) * scores)
    widest = 2 * shape.width * part.samples * shape.sequence / part.shards + 2 * outer_elements(shape, part)
    return again + round(part.element_bytes * widest)
