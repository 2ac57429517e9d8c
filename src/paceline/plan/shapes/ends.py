"""What stands before and after a transformer's blocks: the embedding of words, and the head with its loss."""

from paceline.plan.base import LayerCost
from paceline.plan.cluster import Device
from paceline.plan.shapes.blocks import bytes_s, outer_elements, products_s, words_of
from paceline.plan.shapes.kernels import Kernels, Part
from paceline.plan.shapes.products import Product
from paceline.plan.shapes.shape import Shape

LOSS_BYTES = 36
"""That head and loss read and write of each logit: to full precision, maximum, exponents, sum, and back."""


def embedding(shape: Shape, device: Device, kernels: Kernels, part: Part) -> LayerCost:
    """Looked up, summed with positions, dropout; backward adds to each word's row."""
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


def head(shape: Shape, device: Device, kernels: Kernels, part: Part) -> LayerCost:
    """A norm, a product with as many columns as words are known, and the loss."""
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


def loss_working_bytes(kernels: Kernels, part: Part) -> int:
    """Of a logit, while the loss goes backward, beside what is saved: gradients.

    PyTorch's makes two in full precision; among shards four, of which it has freed the logits it began with
    (torch.distributed.tensor.parallel.loss, ``_nll_loss_and_log_softmax_backward``).
    """
    if kernels.plain_loss:
        return (8 if part.shards == 1 else 12) - part.element_bytes
    return max(0 if kernels.fused_loss else 4, part.element_bytes)
