"""Sizes of a transformer without its code, and from them its parameters and operations, exactly.

::

    embedding   vocab · h (+ positions · h)
    block       attention h·(a + 2k)·d + a·d·h, MLP 2·h·f (gated 3·h·f), two norms, biases
    head        a norm and vocab · h, which a tied one shares with the embedding

Letters: h hidden, a heads, k heads of keys and values, d size of a head, f ffn, s sequence, V vocab.
"""

from dataclasses import dataclass

from paceline.core.errors import InputError
from paceline.planner.base import divisors


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder or an encoder: attention and MLP in blocks that are alike.

    Args:
        layers: blocks.
        hidden: h, elements of a word between blocks.
        heads: a, of queries.
        ffn: f, width of the MLP; 0: four times hidden.
        vocab: V.
        sequence: s, words in a sample.
        kv_heads: k, of keys and values; 0: as many as of queries.
        head_size: d; 0: hidden / heads.
        tied: whether the head has the embedding's parameters.
        gated: whether the MLP has a third matrix (SwiGLU), biases nowhere and norms without one.
        positions: learned ones, ``sequence`` of them; otherwise they have no parameters.
        name: of the model, for reports.

    Raises:
        InputError: a size is below 1, or heads don't go into hidden or into groups.

    >>> gpt2 = Shape(12, 768, 12, vocab=50257, sequence=1024)
    >>> gpt2.parameters, f"{gpt2.flops:.3g}"
    (124439808, '8.75e+11')
    """

    layers: int
    hidden: int
    heads: int
    ffn: int = 0
    vocab: int = 50257
    sequence: int = 1024
    kv_heads: int = 0
    head_size: int = 0
    tied: bool = True
    gated: bool = False
    positions: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "sequence"):
            if (size := getattr(self, name)) < 1:
                raise InputError(f"{name} = {size}: a model has at least one; write {name} = 1 or more.")
        if not self.head_size and self.hidden % self.heads:
            raise InputError(
                f"hidden = {self.hidden} is not divisible by heads = {self.heads}; write head_size as well, "
                f"or heads = {nearest_divisor(self.hidden, self.heads)}."
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise InputError(
                f"heads = {self.heads} is not divisible by kv_heads = {self.kv_heads}; "
                f"write kv_heads = {nearest_divisor(self.heads, self.kv_heads)}."
            )

    @property
    def inner(self) -> int:
        """Elements of a word's queries, a · d."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def keys(self) -> int:
        """Elements of a word's keys, k · d, and as many of its values."""
        return self.inner * (self.kv_heads or self.heads) // self.heads

    @property
    def width(self) -> int:
        """Width of the MLP, f."""
        return self.ffn or 4 * self.hidden

    @property
    def matrices(self) -> int:
        """Elements of a block's weights without norms and biases."""
        attention = self.hidden * (self.inner + 2 * self.keys) + self.inner * self.hidden
        return attention + (3 if self.gated else 2) * self.hidden * self.width

    @property
    def block_parameters(self) -> int:
        """Parameters of a block, with two norms and, where it is not gated, a bias for each output."""
        if self.gated:
            return self.matrices + 2 * self.hidden
        return self.matrices + (self.inner + 2 * self.keys) + 6 * self.hidden + self.width

    @property
    def embedding_parameters(self) -> int:
        """Parameters of words and positions."""
        return (self.vocab + (self.sequence if self.positions else 0)) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the last norm and of the words' matrix, which is the embedding's where they are tied."""
        return (1 if self.gated else 2) * self.hidden + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; tied ones count once."""
        shared = self.vocab * self.hidden if self.tied else 0
        return self.embedding_parameters + self.layers * self.block_parameters + self.head_parameters - shared

    @property
    def flops(self) -> float:
        """Operations of one sample, forward and backward, where backward is twice forward; recomputation is not
        counted.

        Scores of attention count in full, as in Megatron's 72·B·s·l·h²·(1 + s/6h + V/12lh) (2205.05198, appendix A;
        the 96·… of 2104.04473 counts full recomputation as well and is a third more). Norms and such count nothing.
        """
        s, scores = self.sequence, 4.0 * self.sequence**2 * self.inner
        return 3.0 * (self.layers * (2.0 * s * self.matrices + scores) + 2.0 * s * self.hidden * self.vocab)


def nearest_divisor(number: int, near: int) -> int:
    """Return the divisor of ``number`` that is nearest to ``near``."""
    return min(divisors(number), key=lambda d: abs(d - near))
