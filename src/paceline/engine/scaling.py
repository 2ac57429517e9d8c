"""Adding replicas to a run, and taking some away, while it lasts: a request and its answer in the run's folder.

::

    paceline scale RUN replicas=6     scale-request.json ---> the run, at its next tick: members and targets change
                                      scale-answer.json  <--- taken, or refused with a sentence

Both are files, so whoever may write the run's folder may scale it, from any host that sees the folder; nothing listens.
"""

import contextlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from paceline.core.errors import InputError, WaitTimeoutError
from paceline.core.safe_files import read_json, write_json
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.worker_metrics import SERVER_NAME
from paceline.strategy import Strategy

Host = TypeVar("Host")

REQUEST, ANSWER = "scale-request.json", "scale-answer.json"

# Period at which a command looks for the answer.
LOOK_S: Seconds = 0.05


class ScaleAnswer(NamedTuple):
    """What a run says to a request."""

    replicas: int
    """That take part or are starting, once the request has been met."""
    before: int
    refused: str | None
    """Why nothing changes; None: something does."""


class ScaleRequests:
    """The requests to one run, as the run reads them.

    Args:
        folder: of the run; None: there is none, so nobody can ask.
        strategy: has the bounds.
    """

    def __init__(self, folder: Path | None, strategy: Strategy) -> None:
        self._folder, self._strategy = folder, strategy
        self._seen: str | None = None

    def poll(self, staying: Callable[[], int]) -> int | None:
        """Return how many replicas are asked for, and answer; None: nothing new, or what was asked was refused.

        Args:
            staying: returns how many take part or are starting.
        """
        if self._folder is None or not (self._folder / REQUEST).exists():
            return None
        with contextlib.suppress(InputError):  # a request that can't be read is none
            request = read_json(self._folder / REQUEST)
            number, replicas = request.get("request"), request.get("replicas")
            if number == self._seen or not isinstance(replicas, int) or not isinstance(number, str):
                return None
            self._seen = number
            now, refused = staying(), self._refusal(replicas)
            answer = ScaleAnswer(now if refused else replicas, now, refused)
            with contextlib.suppress(OSError, InputError):  # the disk may be full; the run goes on
                write_json(self._folder / ANSWER, {"request": number, **answer._asdict()})
            return None if refused else replicas
        return None

    def _refusal(self, replicas: int) -> str | None:
        strategy = self._strategy
        if strategy.least_replicas is None:
            return f"its replicas={strategy.replicas} are fixed; start it with bounds, replicas=1..{strategy.replicas}"
        if not strategy.least_replicas <= replicas <= strategy.replicas:
            return (
                f"replicas={replicas} is out of its bounds, replicas={strategy.bounds}; write one from "
                f"{strategy.least_replicas} to {strategy.replicas}"
            )
        return None


def fitting(strategy: Strategy, cores: Iterable[int]) -> int:
    """Return how many replicas run: all, or as many within the bounds as hosts with so many cores have room for.

    >>> fitting(Strategy(replicas="2..8", threads=2), [4, 7]), fitting(Strategy(replicas="2..8"), [1])
    (5, 2)
    >>> four = Strategy(replicas="1..8", stages=2, shards=2)  # workers a replica
    >>> fitting(four, [7, 9]), fitting(four, [3, 2]), fitting(four, [3, 3, 3])
    (3, 1, 2)
    """
    if strategy.least_replicas is None:
        return strategy.replicas
    each, hosts = strategy.workers // strategy.replicas * (strategy.threads or 1), [*cores]
    room = sum(there // each for there in hosts) or sum(hosts) // each  # where no host has room, replicas span several
    return max(strategy.least_replicas, min(strategy.replicas, room))


def next_hosts(workers: int, placed: Mapping[Host, int], cores: Mapping[Host, float]) -> list[Host]:
    """Return the host of each worker of one more replica: one that has so many cores, or as few as have them together.

    Of those that do, it is the one with the fewest workers for its cores. A host without cores, as a cluster's head
    often is, has none where others have some.

    Args:
        workers: of a replica.
        placed: workers that each host has; a host without one need not be there.
        cores: of each host.

    >>> next_hosts(1, {"a": 1, "b": 2}, {"a": 2, "b": 4})
    ['b']
    >>> next_hosts(2, {"b": 4}, {"a": 1, "b": 4}), next_hosts(3, {}, {"a": 2, "b": 2})
    (['b', 'b'], ['a', 'a', 'b'])
    >>> next_hosts(3, {}, {"a": 1.5, "b": 1.5}), next_hosts(3, {}, {"a": 1})
    (['a', 'a', 'b'], ['a', 'a', 'a'])
    >>> next_hosts(1, {"worker": 3}, {"head": 0, "worker": 2})
    ['worker']
    """
    cores = {host: count for host, count in cores.items() if count} or dict.fromkeys(cores, 1.0)
    large = [host for host in cores if cores[host] >= workers]
    if large:
        return [min(large, key=lambda host: (placed.get(host, 0) + workers) / cores[host])] * workers
    each = math.ceil(workers / sum(cores.values()))  # workers a core
    in_turn = sorted(cores, key=lambda host: ((placed.get(host, 0) + 1) / cores[host], -cores[host]))
    return [host for host in in_turn for _ in range(math.ceil(cores[host] * each))][:workers]


def moves(staying: Collection[ReplicaId], replicas: int, bound: int) -> tuple[Sequence[ReplicaId], Sequence[ReplicaId]]:
    """Return which replicas leave and which join, so that there are so many: those of the lowest numbers stay.

    Args:
        staying: take part, or will, and are not to leave.
        replicas: how many there are to be.
        bound: on their numbers.

    >>> moves({0, 2, 3}, 2, 4), moves({0, 2}, 4, 4)
    (([3], []), ([], [1, 3]))
    """
    free = sorted(set(range(bound)).difference(staying))
    return sorted(staying)[replicas:], free[: max(0, replicas - len(staying))]


@contextlib.contextmanager
def scaling_files(folder: Path | None) -> Iterator[None]:
    """Context manager of a run: requests of earlier runs count no more, and none stays behind."""
    remove_scaling_files(folder)
    try:
        yield
    finally:
        remove_scaling_files(folder)


def remove_scaling_files(folder: Path | None) -> None:
    """Remove requests and answers; do nothing where there is none."""
    if folder is None:
        return
    for name in (REQUEST, ANSWER):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def scale(folder: Path, replicas: int, timeout_s: Seconds = 10.0) -> ScaleAnswer:
    """Ask a run for another number of replicas, and wait for its answer; they come and go after that.

    Args:
        folder: of the run, ``out=``.
        replicas: how many.
        timeout_s: longest wait for the answer.

    Raises:
        InputError: no run is under way there, or it refuses.
        WaitTimeoutError: it does not answer.
    """
    if not (folder / "workers.json").exists():
        raise InputError(f"no run is under way in {folder}; name the folder that its out= or --out names")
    if (folder / SERVER_NAME).exists():
        raise InputError(
            f"the run in {folder} is a server's, which starts no replicas: let processes join it, "
            f"paceline.join(…, address={str(folder)!r}), or end some"
        )
    number = uuid.uuid4().hex
    write_json(folder / REQUEST, {"request": number, "replicas": replicas, "pid": os.getpid()})
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = _answer(folder, number)
        if answer is not None and answer.refused is not None:
            raise InputError(f"the run in {folder} stays as it is: {answer.refused}")
        if answer is not None:
            return answer
        if not (folder / "workers.json").exists():
            raise InputError(f"the run in {folder} has ended")
        time.sleep(LOOK_S)
    raise WaitTimeoutError(
        f"the run in {folder} has not answered within {timeout_s:g} s; it may be starting or scoring, or have been "
        "killed"
    )


def _answer(folder: Path, number: str) -> ScaleAnswer | None:
    """Return the answer to a request; None while there is none."""
    with contextlib.suppress(OSError, ValueError):
        answer = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
        if answer.pop("request") == number:
            return ScaleAnswer(**answer)
    return None
