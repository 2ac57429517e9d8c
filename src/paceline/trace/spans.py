"""Spans: an action of a worker from one time to another; one record per interval, one JSON line each.

======================================  ======================================================================
compute                                 forward and backward together, if they are not timed separately
forward, backward                       of one (micro-)batch
backward_input, backward_weight         the two halves of a backward pass that is split
recompute                               a forward pass made again for its activations
send, receive, all_reduce               bytes between workers that compute one Δ, or between equal replicas
pull, push                              a replica reads A; a replica hands its Δ over
apply                                   a server updates its part of A
wait                                    idle until another worker is done; never part of another span
delay                                   the requested delay
evaluate                                evaluation, off the training path
======================================  ======================================================================
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from paceline.core.errors import InputError
from paceline.core.safe_files import read_bytes, reading, replacing
from paceline.core.types import Nanoseconds

# Action that computes on one micro-batch.
Pass: TypeAlias = Literal["forward", "backward", "backward_input", "backward_weight", "recompute"]

# Action that moves bytes between workers.
Transfer: TypeAlias = Literal["send", "receive", "all_reduce", "pull", "push"]

# Action of a worker during a span.
Action: TypeAlias = Literal["compute", Pass, Transfer, "apply", "wait", "delay", "evaluate"]

# All actions, in the order in which legends show them.
ACTIONS: tuple[Action, ...] = get_args(Action)

PASSES: frozenset[Action] = frozenset(get_args(Pass))

# The replica of spans of servers and of the coordinator.
SERVER = -1


@dataclass(frozen=True, slots=True)
class Span:
    """One action of a worker from ``start_ns`` to ``end_ns``, on the clock that all workers of the run share."""

    replica: int
    """-1 (:data:`SERVER`) for servers and the coordinator."""
    stage: int
    shard: int
    action: Action
    step: int
    """The replica's clock; of an ``apply``, the version it makes."""
    micro_batch: int
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    bytes: int
    """Bytes moved between workers, or 0."""

    @property
    def duration_ns(self) -> Nanoseconds:
        """Return how long it lasted."""
        return self.end_ns - self.start_ns


_KEYS = tuple(each.name for each in fields(Span))
_INTEGERS = tuple(key for key in _KEYS if key != "action")


def write_spans(path: str | os.PathLike[str], spans: Iterable[Span]) -> None:
    """Write one JSON line per span; the file appears whole or not at all."""
    with replacing(path) as file:
        file.writelines(
            json.dumps({key: getattr(span, key) for key in _KEYS}, separators=(",", ":")) + "\n" for span in spans
        )


def read_spans(path: str | os.PathLike[str]) -> list[Span]:
    """Return the spans of a file that :func:`write_spans` wrote.

    Raises:
        InputError: no such file, or a line that is no span; the message names the line and what is wrong with it.
    """
    with reading(Path(path)):
        lines = read_bytes(Path(path)).decode().splitlines()
    spans: list[Span] = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is no JSON: {error}; write one JSON object a line.") from error
        if not isinstance(record, dict) or record.keys() != set(_KEYS):
            raise InputError(f"{where} is no span; write one JSON object a line, with the keys {', '.join(_KEYS)}.")
        if record["action"] not in ACTIONS:
            raise InputError(f"{where}: unknown action {record['action']!r}; write one of: {', '.join(ACTIONS)}.")
        for key in _INTEGERS:
            if type(record[key]) is not int:
                raise InputError(f"{where}: {key}={record[key]!r} is no whole number; write {key}=0, say.")
        if record["end_ns"] < record["start_ns"]:
            raise InputError(f"{where}: end_ns={record['end_ns']} is before start_ns={record['start_ns']}; swap them.")
        spans.append(Span(**record))
    return spans
