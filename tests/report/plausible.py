"""Runs that look like real ones, made by hand: curves, staleness and spans follow from the policy alone."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import torch

from paceline.comparison import Comparison
from paceline.core.records import Account, Record, ReplicaExit, WorkerFigures
from paceline.metrics.summary import summarize
from paceline.run import Run
from paceline.strategy import Strategy
from paceline.trace.spans import SERVER, Action, Span

SYNCHRONOUS = "replicas=8"
ASYNCHRONOUS = "replicas=8 aggregation=asynchronous"
SWITCHING = "replicas=8 aggregation=smooth-switch:every=300"
SECONDS = 20.0
MS = 1_000_000


def comparison(rounds: int = 3, *, traced: bool = True) -> Comparison:
    """Three strategies; the first replica to die does so in the second round of the third."""
    runs = {text: [run(text, seed, traced=traced) for seed in range(rounds)] for text in _PACE}
    return Comparison(runs, ASYNCHRONOUS)


def run(text: str = SWITCHING, seed: int = 0, *, traced: bool = True) -> Run:
    """One run of a strategy above."""
    random_ = random.Random(f"{text} {seed}")
    threshold = 8 if text == SYNCHRONOUS else 1
    left = [ReplicaExit(3, "killed by SIGKILL", 7.4)] if (text, seed) == (SWITCHING, 1) else []
    spans = _spans(text, random_) if traced else []
    luck = random_.uniform(0.85, 1.15)
    history = [_record(text, k, threshold, luck, random_) for k in range(21)]
    account = _account(text, history[-1], left, random_)
    strategy = Strategy.parse(text)
    state = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)}
    return Run("digits", strategy, "local", state, summarize(account, history, host=True), history, left, spans)


# gradients per second, how many gradients an update takes at first, how fast the loss falls
_PACE = {SYNCHRONOUS: (150.0, 8, 0.16), ASYNCHRONOUS: (420.0, 1, 0.26), SWITCHING: (400.0, 1, 0.30)}


def _record(text: str, k: int, threshold: int, luck: float, random_: random.Random) -> Record:
    rate, _, fall = _PACE[text]
    fall *= luck
    time_s = SECONDS * k / 20
    if text == SWITCHING:
        threshold = min(8, 1 + int(rate * time_s / 500))
    loss = 0.12 + 2.18 * math.exp(-fall * time_s) * (1 + 0.06 * random_.random() * (k > 0))
    gradients = int(rate * time_s)
    updates = gradients // threshold
    accuracy = 0.1 + 0.87 * (1 - math.exp(-1.5 * fall * time_s)) - 0.02 * random_.random() * (k > 0)
    staleness = None if k == 0 else max(0.0, 8 / threshold - 1)
    return Record(time_s, updates, gradients, threshold, staleness, 0.95 * loss, loss, accuracy)


def _account(text: str, last: Record, left: Sequence[ReplicaExit], random_: random.Random) -> Account:
    histogram = Counter(0 if text == SYNCHRONOUS else round(random_.gammavariate(8, 7 / 8)) for _ in range(2000))
    busy = [1.0 if text != SYNCHRONOUS or r % 2 else 0.45 + 0.1 * random_.random() for r in range(8)]
    steps = [int(last.gradients / 8 * (1 if text == SYNCHRONOUS else 0.6 + 0.8 * (r % 2 == 0))) for r in range(8)]
    workers = [
        WorkerFigures(r, 0, 0, steps[r], SECONDS * 0.96 * busy[r], 0.02, 8_800 * steps[r], 210_000_000, 17_600)
        for r in range(8)
    ]
    applied = last.gradients - 3
    return Account(
        seconds=SECONDS,
        updates=last.updates,
        gradients=last.gradients,
        applied=applied,
        discarded=3,
        cancelled=0,
        nonfinite=0,
        samples=32 * applied,
        staleness=histogram,
        workers=tuple(workers),
        left=tuple(left),
        start_digest="5e" * 32,
    )


def _spans(text: str, random_: random.Random) -> list[Span]:
    """Every second replica is slowed; synchronous ones wait for the last of a round."""
    clocks, spans = [0] * 8, list[Span]()
    for step in range(1, 61):
        for replica in range(8):
            clocks[replica] = _step(spans, replica, step, clocks[replica], random_)
        if text == SYNCHRONOUS:
            latest = max(clocks)
            spans += [Span(r, 0, 0, "wait", step, 0, at, latest, 0) for r, at in enumerate(clocks) if at < latest]
            clocks = [latest] * 8
    pushes = sorted(span.end_ns for span in spans if span.action == "push")
    spans += [Span(SERVER, 0, 0, "apply", k, 0, at, at + MS // 3, 0) for k, at in enumerate(pushes, start=1)]
    return spans


def _step(spans: list[Span], replica: int, step: int, at: int, random_: random.Random) -> int:
    slow = max(0.0, random_.gauss(0, 18)) if replica % 2 else 0.0
    parts: list[tuple[Action, float]] = [("pull", 0.5), ("forward", 4), ("backward", 8), ("delay", slow), ("push", 0.8)]
    for action, ms in parts:
        end = at + int(ms * (0.9 + 0.2 * random_.random()) * MS)
        if end > at:
            spans.append(Span(replica, 0, 0, action, step, 0, at, end, 8_800 if action in ("pull", "push") else 0))
        at = end
    return at
