"""What happens in a run at the server, as the process is told of it that shows the run and has its callbacks.

::

    main      stand(known) ----------------------+             watcher <--- events, in order
    server                 ... a change, a tick  +--> News: what is not known yet

Main says how much it knows, so nothing is told twice, also not by a standby that has taken over.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.records import Record, ReplicaExit
from paceline.core.types import Version
from paceline.engine.base import Job, LoopEvent, RunEvent, Watcher
from paceline.engine.checkpointing import tell
from paceline.engine.loop import RunLoop


class Known(NamedTuple):
    """How much main knows."""

    sentences: int
    records: int
    exits: int
    version: Version
    """Of the newest checkpoint that it knows."""
    reported: int = 0
    """By loops."""


class News(NamedTuple):
    """What main does not know."""

    sentences: tuple[str, ...] = ()
    """For the user."""
    records: tuple[Record, ...] = ()
    exits: tuple[ReplicaExit, ...] = ()
    saved: tuple[Version, ...] = ()
    """Of checkpoints that are whole."""
    reported: tuple[LoopEvent, ...] = ()
    """By loops."""


NOTHING = News()


class ServerNews:
    """The server's end.

    Args:
        loop: of the run.
    """

    def __init__(self, loop: RunLoop) -> None:
        self._loop = loop
        self.saved: Sequence[Version] = ()
        """Versions of checkpoints that are whole."""
        self.sentences = list[str]()
        """All that the user was to know."""
        self._reported, self._dropped = list[LoopEvent](), 0
        """What loops have reported and main may not know, and how much it knew before."""

    async def reported(self, event: LoopEvent) -> None:
        """Keep what a loop reports until main knows it."""
        self._reported.append(event)

    def since(self, known: Known) -> News:
        """Return what main does not know, and drop what loops have reported that it knows."""
        del self._reported[: max(0, known.reported - self._dropped)]
        self._dropped = max(self._dropped, known.reported)
        return News(
            tuple(self.sentences[known.sentences :]),
            tuple(self._loop.history.records[known.records :]),
            tuple(self._loop.exits[known.exits :]),
            tuple(version for version in self.saved if version > known.version),
            tuple(self._reported),
        )


class NewsReader:
    """Main's end.

    Args:
        job: of the run.
        watch: takes the events.
    """

    def __init__(self, job: Job, watch: Watcher) -> None:
        before = job.resume.run if job.resume is not None else None
        self._job, self._watch = job, watch
        self.known = Known(0, len(before.history.records), len(before.exits), -1) if before else Known(0, 0, 0, -1)

    def take(self, news: News) -> None:
        """Tell the user, and callbacks, what is new."""
        sentences, records, exits, version, reported = self.known
        version = max(news.saved, default=version)
        counts = sentences + len(news.sentences), records + len(news.records), exits + len(news.exits)
        self.known = Known(*counts, version, reported + len(news.reported))  # before what a callback raises
        for sentence in news.sentences:
            tell(sentence)
        timed: list[Record | ReplicaExit] = [*news.records, *news.exits]
        events: list[RunEvent] = [*sorted(timed, key=lambda event: event.time_s)]
        if self._job.checkpoint is not None:
            events += [self._job.checkpoint.folder / f"step-{version}" for version in news.saved]
        for event in (*news.reported, *events):
            self._watch.event(event)

    def another_server(self) -> None:
        """Note that a standby has taken over, which has said nothing yet."""
        self.known = self.known._replace(sentences=0, reported=0)
