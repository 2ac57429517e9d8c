"""Which compressions there are: what a Strategy says. How each is carried out lies in ``comm/compression/``. No torch.

    >>> from paceline import Strategy
    >>> Strategy(replicas=4, compression="powersgd:rank=2").compression
    'powersgd:rank=2'

A compression of your own is one file. It has a method, which is what the text says, and what carries it out::

    @register("signs")
    @dataclass(frozen=True)
    class Signs(Method):
        scale: float = 1.0                     # text form: signs:scale=0.5

    @carries(Signs)
    @dataclass(frozen=True)
    class SignReduction(Compression[None]):    # paceline.comm.compression.base
        method: Signs
"""

from abc import ABC
from dataclasses import dataclass
from typing import Any

from paceline.core.checks import check_int, check_number
from paceline.core.errors import InputError
from paceline.core.registry import declare, register
from paceline.core.text_form import parse_option, text_of


@declare("compression")
class Method(ABC):  # noqa: B024  # what a method does is torch's business: comm/compression/base.py has the contract
    """How gradients are made smaller for transport, as a value. Subclasses are registered frozen dataclasses."""


@register("none")
@dataclass(frozen=True)
class Whole(Method):
    """Gradients travel as they are."""


@register("fp16")
@dataclass(frozen=True)
class Fp16(Method):
    """Half precision: 11 significant bits, scaled so that nothing overflows."""


@register("bf16")
@dataclass(frozen=True)
class Bf16(Method):
    """bfloat16: 8 significant bits, the range of float32."""


@register("powersgd")
@dataclass(frozen=True)
class PowerSgd(Method):
    """Matrices of low rank (Vogels et al. 2019, arXiv 1905.13727).

    Args:
        rank: r of each matrix that is sent. With 4, the paper reaches SGD's accuracy in both of its tasks.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        check_int("powersgd:rank", self.rank, least=1)


@register("top-k")
@dataclass(frozen=True)
class TopK(Method):
    """The largest elements alone (Stich et al. 2018, arXiv 1809.07599).

    Args:
        ratio: k/n, which part of the elements is sent, above 0 and up to 1.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_number("top-k:ratio", self.ratio, "above 0 and up to 1", lambda v: 0 < v <= 1, instead=0.01)


def parse(text: str) -> Method:
    """The method that a text says.

    Raises:
        InputError: an unknown method or option, with the nearest name; a value out of its range.

    >>> parse("top-k:ratio=0.1")
    TopK(ratio=0.1)
    """
    method: Method = parse_option("compression", Method, text)
    return method


def canonical(text: Any) -> str:
    """The text of the same compression that has only what differs from the defaults.

    >>> canonical("powersgd:rank=4"), canonical("top-k:ratio=0.5")
    ('powersgd', 'top-k:ratio=0.5')
    """
    if not isinstance(text, str):
        raise InputError(
            f"compression={text!r} is no text; write compression='none', or compression='powersgd:rank=4'."
        )
    return text_of(parse(text))
