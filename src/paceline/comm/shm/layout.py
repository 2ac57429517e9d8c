"""Where things lie in the shared memory of a group.

::

    | token | posted | failures | headers | notes | stages | channels |
              N        N          2 x N     2 x N   2 x N    N x N         N ranks; 2: even and odd rounds

A round's headers, notes and stages are those of its parity, so that who is quick can write the next round while who is
slow still reads this one.
"""

from dataclasses import dataclass

LINE = 64
"""Bytes. Words that different ranks write are so far apart that they share no cache line."""

PAGE = 4096

TOKEN_BYTES = 16

FAILURE_BYTES = 2048
"""Of what a rank says when it fails: two words, whether and how long, and the text."""

PIECE_BYTES = 256 * 1024
"""What one slot of a channel carries."""

PIECES = 4
"""Slots of a channel: how many pieces a sender may be ahead."""

_WORD = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes, for a group of so many ranks.

    Args:
        size: N, the ranks.
        stage_bytes: what a rank can show the others in one round; a multiple of the page size.
    """

    size: int
    stage_bytes: int

    @property
    def posted(self) -> int:
        """One line a rank: how many rounds it has posted."""
        return LINE

    @property
    def failures(self) -> int:
        return self.posted + LINE * self.size

    @property
    def headers(self) -> int:
        """One line a rank and parity: what it calls."""
        return self.failures + FAILURE_BYTES * self.size

    @property
    def notes_words(self) -> int:
        """Of one rank and parity: how much it has for each rank, then how much it expects from each."""
        return 2 * self.size

    @property
    def notes(self) -> int:
        return self.headers + 2 * LINE * self.size

    @property
    def stages(self) -> int:
        return _paged(self.notes + 2 * self.size * self.notes_words * _WORD)

    @property
    def channels(self) -> int:
        return self.stages + 2 * self.size * self.stage_bytes

    @property
    def channel_bytes(self) -> int:
        """Two lines that count, then the headers of the slots, then their pieces."""
        return _paged(LINE * (2 + PIECES)) + PIECES * PIECE_BYTES

    @property
    def size_bytes(self) -> int:
        return self.channels + self.size * self.size * self.channel_bytes

    def stage(self, parity: int, rank: int) -> int:
        """A rank's stage in the rounds of a parity."""
        return self.stages + (parity * self.size + rank) * self.stage_bytes

    def channel(self, source: int, destination: int) -> int:
        """Where the channel between two ranks begins."""
        return self.channels + (source * self.size + destination) * self.channel_bytes


def _paged(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE
