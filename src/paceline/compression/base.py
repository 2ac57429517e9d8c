"""How a gradient is made smaller on its way through an all-reduce: the contract.

::

    rank 0   gradient ---- compress ----+                    +---- decompress ---- Σ gradient
                              |         |                    |
                            loss        +--- few bytes, all --+    the same bits on every rank
                              |         |    ranks to all     |
    rank 1   gradient ---- compress ----+                    +---- decompress ---- Σ gradient

The loss may be kept and added to the next gradient (error feedback): then nothing is lost, it only comes later.

A compression is a frozen value; all that changes from step to step is the state that it makes and is given back::

    compression = parse("powersgd:rank=2")
    state = compression.start(shapes, torch.float32)
    for each step:
        sent_bytes = compression.all_reduce(state, gradient, group)

A Δ that a replica sends to a server of A is summed with none: :meth:`Compression.encode` makes one message of it, with
the same state.

It works over any backend that has ``all_reduce`` and ``all_gather``. Sums of the same bits are only as equal as the
arithmetic: ranks need processors of one kind, one build of torch and equally many threads, as for the update itself.

A compression of your own is one file. A Strategy reads its name without torch, so methods import torch when they run::

    @register("signs")
    @dataclass(frozen=True)
    class Signs(Stateless):
        scale: float = 1.0                     # text form: signs:scale=0.5
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, final

from paceline.core.errors import InputError
from paceline.core.registry import declare
from paceline.core.text_form import parse_option, text_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Shape: TypeAlias = tuple[int, ...]

# As text, so that nothing imports torch; compressions annotate with these.
Tensor: TypeAlias = "torch.Tensor"
DType: TypeAlias = "torch.dtype"
Device: TypeAlias = "torch.device | str"
Group: TypeAlias = "dist.ProcessGroup"
# What one rank alone has not sent yet, and by name what is the same on all.
Kept: TypeAlias = "tuple[torch.Tensor | None, Mapping[str, torch.Tensor]]"

S = TypeVar("S")


@declare("compression")
class Compression(ABC, Generic[S]):
    """One way to sum gradients over ranks with fewer bytes. Subclasses are registered frozen dataclasses."""

    @abstractmethod
    def start(self, shapes: Sequence[Shape], dtype: DType, device: Device = "cpu") -> S:
        """Return the state of one gradient before its first step: the same on every rank, and picklable.

        Args:
            shapes: of the parameters, in their order in the gradient.
            dtype: float32 or float64.
            device: of the gradients.
        """

    @abstractmethod
    def all_reduce(self, state: S, gradient: Tensor, group: Group) -> int:
        """Replace ``gradient`` by its sum over the ranks of ``group``, the same bits on each, and advance ``state``.

        If a rank's gradient is not finite, the sum is not finite on any rank, and what earlier steps have left in the
        state stays as it was: an engine may skip the step and go on.

        Args:
            state: of :meth:`start`; its tensors change.
            gradient: this rank's term, one contiguous vector, the parameters one after another.
            group: every rank of it makes the same call.

        Returns:
            The bytes that this rank has sent: :func:`ring_bytes` for all-reduces, :func:`gather_bytes` for all-gathers.
        """

    @abstractmethod
    def kept(self, state: S) -> Kept:
        """Return what a run that goes on must have of a state: tensors of the state, which may be written.

        Returns:
            What this rank has not sent yet, as long as the gradient; and by name what is the same on all ranks.
        """

    # ------------------------------------------------------------------- one message, of a replica to a server of A

    whole_parameters: ClassVar[bool] = False
    """True if it makes more of whole parameters than of pieces of them."""

    def message_bytes(self, shapes: Sequence[Shape], dtype: DType) -> int:
        """Return the size of the message that :meth:`encode` makes of a gradient of these parameters."""
        del shapes, dtype
        raise InputError(
            f"compression={self} sums over all ranks, but has no message for a server of A; write "
            "compression=fp16, or encode() and decode() for it"
        )

    def encode(self, state: S, gradient: Tensor) -> Tensor:
        """Return a gradient as a message, replace it by what :meth:`decode` makes of that, and advance ``state``.

        Args:
            state: of :meth:`start`, of one replica.
            gradient: one contiguous vector. One that is not finite leaves a message that is not, and the state.

        Returns:
            Its bytes, as uint8.
        """
        raise NotImplementedError

    def decode(self, shapes: Sequence[Shape], message: Tensor, out: Tensor) -> None:
        """Write the gradient of a message to ``out``."""
        raise NotImplementedError

    def __str__(self) -> str:
        return text_of(self)


class Stateless(Compression[None]):
    """A compression that keeps nothing from step to step."""

    @final
    def start(self, shapes: Sequence[Shape], dtype: DType, device: Device = "cpu") -> None:
        del shapes, dtype, device

    @final
    def kept(self, state: None) -> Kept:
        del state
        return None, {}


def joined(*tensors: Tensor) -> Tensor:
    """Return the bytes of tensors one after the other."""
    import torch

    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def split(message: Tensor, *like: tuple[int, DType]) -> list[Tensor]:
    """Return the tensors of which a message was :func:`joined`, by their elements and dtypes; copies.

    >>> import torch
    >>> split(joined(torch.ones(2), torch.zeros(1, dtype=torch.int64)), (2, torch.float32), (1, torch.int64))
    [tensor([1., 1.]), tensor([0])]
    """
    import torch

    pieces = torch.split(message, [count * dtype.itemsize for count, dtype in like])
    return [piece.clone().view(dtype) for piece, (_, dtype) in zip(pieces, like, strict=True)]


def parse(text: str) -> Compression[Any]:
    """Return the compression that a text says.

    Raises:
        InputError: an unknown compression or option, with the nearest name; a value out of its range.

    >>> parse("top-k:ratio=0.1")
    TopK(ratio=0.1)
    """
    compression: Compression[Any] = parse_option("compression", Compression, text)
    return compression


def canonical(text: Any) -> str:
    """Return the text of the same compression that has only what differs from the defaults.

    >>> canonical("powersgd:rank=4"), canonical("top-k:ratio=0.5")
    ('powersgd', 'top-k:ratio=0.5')
    """
    if not isinstance(text, str):
        raise InputError(
            f"compression={text!r} is no text; write compression='none', or compression='powersgd:rank=4'."
        )
    return str(parse(text))


def all_reduce(tensor: Tensor, group: Group) -> int:
    """Replace a tensor by its sum over the ranks, and return the :func:`ring_bytes` of it."""
    import torch.distributed as dist

    dist.all_reduce(tensor, group=group)
    return ring_bytes(tensor, group.size())


def ring_bytes(tensor: Tensor, ranks: int) -> int:
    """Return 2·(P−1)/P·n·b: the bytes that a rank sends in a ring all-reduce of n elements of b bytes; rounded up.

    Each of the P slices of the ring leaves a rank P-1 times in all: once for each sum but its own, once for each copy.
    Backends may take other ways; this is the least that any of them can send per rank.

    >>> import torch
    >>> ring_bytes(torch.zeros(1000), 4)
    6000
    """
    return -(-2 * (ranks - 1) * tensor.nbytes // ranks)


def gather_bytes(tensor: Tensor, ranks: int) -> int:
    """Return (P−1)·k·b: the bytes that a rank sends in an all-gather to which each gives k elements of b bytes.

    >>> import torch
    >>> gather_bytes(torch.zeros(1000), 4)
    12000
    """
    return (ranks - 1) * tensor.nbytes
