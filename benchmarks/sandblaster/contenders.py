"""What is compared, what it costs in virtual time, and one run of it.

A replica, an update of A::

    replica   |- pull A -|-- samples · SAMPLE_S --|- push Δ -|
    server                                                   |- K Δs · gradient + apply -|

Rates are assumed for hosts of 2012, not measured: 20 cores of 5 GFLOP/s, links of 10 Gbit/s, memory of 20 GB/s. Dense
layers take 6 FLOP and 4 bytes of Δ for a parameter, so the ratio of the two does not depend on the model's size: a
transfer takes as long as 53 samples, and a pass over A or Δ in a server's memory as long as 3.3. Seconds are those of
42 million parameters, the paper's model of speech; what learns is a small perceptron.
"""

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad

from paceline import LBFGS, NonFiniteError, Program, train
from paceline.clock.cluster_file import Links
from paceline.clock.network import Network
from paceline.clock.times import Times
from paceline.core.records import Record
from paceline.datasets import load_program
from paceline.datasets.models import Samples, classifier, mlp
from paceline.program import as_tensors

PARAMETERS, FLOP_PER_S, LINK_BYTES_PER_S, MEMORY_BYTES_PER_S, LATENCY_S = 42e6, 100e9, 1.25e9, 20e9, 1e-4
SAMPLE_S = 6 * PARAMETERS / FLOP_PER_S
TRANSFER_S = 4 * PARAMETERS / LINK_BYTES_PER_S
PASS_S = 4 * PARAMETERS / MEMORY_BYTES_PER_S
SPREAD = 0.1
"""Standard deviation of the time to compute, over its mean."""
DELTA_PASSES = 3
"""Of a server for each Δ: read it, read and write what it is added to."""

TARGET = 0.15
"""Test loss at which the time is taken; the accuracy is then about 95 %."""
POINTS = 200
"""At which a run is evaluated at most, and so how exact its times are."""

ALONE_S, WARMED, WARM_REPLICAS = 2.0, ("Downpour SGD", "Downpour Adagrad"), (64, 256)
"""Of warm starts: how long one replica trains alone, which contender has one, with how many replicas."""


def limit_s(replicas: int, servers: int) -> float:
    """Return the virtual seconds after which a run has failed, the same for every contender."""
    return max(5.0, 60.0 / replicas**0.5) if servers >= replicas else 120.0 / servers**0.5


# ----------------------------------------------------------------------------------------------------- what is compared


class Setting(NamedTuple):
    """What is tuned."""

    size: int
    """Samples of a Δ; or, where a batch is all samples, its portions for each replica."""
    rate: float
    """Learning rate, before it is divided for the number of replicas."""
    history: int = 0

    def __str__(self) -> str:
        return f"{self.size}; {self.rate:g}" + (f"; {self.history}" if self.history else "")


@dataclass(frozen=True)
class Contender:
    """A policy and an optimizer, with the settings among which the best is looked for.

    Args:
        policy: of aggregation.
        optimizer: of A.
        passes: of the servers over their part of A for an update, besides those for each Δ.
        grid: of settings, twelve for each contender.
        divided: the learning rate is divided by P to this power: 1 where each of P Δs is an update, which together
            move A as far as one with the rate that is written; 1/2 for Adagrad's, whose sum grows with the root of P.
    """

    policy: str
    optimizer: Callable[..., torch.optim.Optimizer]
    passes: int
    grid: Sequence[Setting]
    divided: float = 0.0

    @property
    def whole(self) -> bool:
        """Return whether a batch is all samples."""
        return self.policy == "sandblaster"


def _grid(sizes: Sequence[int], rates: Sequence[float], histories: Sequence[int] = (0,)) -> Sequence[Setting]:
    return [Setting(size, rate, history) for size in sizes for rate in rates for history in histories]


BATCHES, PORTIONS, RATES = (8, 32, 128), (1, 2, 4), (0.75, 1.5, 3.0, 6.0)
CONTENDERS = {
    "synchronous SGD": Contender("synchronous", SGD, 3, _grid(BATCHES, RATES)),
    "Downpour SGD": Contender("asynchronous", SGD, 0, _grid(BATCHES, RATES), divided=1.0),
    "Downpour Adagrad": Contender("asynchronous", Adagrad, 2, _grid(BATCHES, (0.075, 0.15, 0.3, 0.6)), divided=0.5),
    "Sandblaster SGD": Contender("sandblaster", SGD, 3, _grid(PORTIONS, RATES)),
    # 3 (2m + 1) products of two vectors and 2m additions to d with m pairs: the mean over the first ten iterations.
    "Sandblaster L-BFGS": Contender("sandblaster", LBFGS, 100, _grid(PORTIONS, (0.5, 1.0), (4, 10))),
}


def problem(seed: int, data: Path | None = None) -> Program:
    """Return digits with 1,024 samples to train and 773 to test; or MNIST from a folder, under a perceptron too.

    The number of training samples is a power of 2, so that every Δ has as many samples as its setting says.
    """
    loaded = load_program("mnist" if data else "digits", data=data, seed=seed)
    assert loaded.test is not None
    pairs = [as_tensors(loaded.train), as_tensors(loaded.test)]
    train, test = [(pair[0].flatten(1), pair[1]) for pair in pairs if pair is not None]
    cut = 1 << (len(train[1]).bit_length() - 1)
    train, test = _cut(train, test, cut)
    model = functools.partial(mlp, train[0].shape[1], 64, 10, activation=torch.nn.Tanh)
    return classifier(loaded.name, model, train, test, seed=seed, lr=0.0)


def _cut(train: Samples, test: Samples, samples: int) -> tuple[Samples, Samples]:
    """Return the first samples to train, and the others with those to test."""

    def rest(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a[samples:], b])

    return (train[0][:samples], train[1][:samples]), (rest(train[0], test[0]), rest(train[1], test[1]))


# -------------------------------------------------------------------------------------------------------------- one run


def times_of(contender: Contender, batch: int, replicas: int, servers: int) -> str:
    """Return the times of a run: of a micro-step with so many samples, of a message, and of an update.

    With as many servers as replicas each host's link carries one A and one Δ in each round, which is the transfer. With
    fewer the links of the servers carry Δs one after the other, and A to all of who has waited for it.
    """
    compute = batch * SAMPLE_S
    few = servers < replicas
    gradient = max(DELTA_PASSES * PASS_S, TRANSFER_S if few else 0.0) / servers
    apply = contender.passes * PASS_S / servers
    if few and contender.policy != "asynchronous":
        apply += replicas * TRANSFER_S / servers
    return (
        f"compute=normal:mean={compute:.6g},std={SPREAD * compute:.6g} transfer={TRANSFER_S + LATENCY_S:.6g} "
        f"apply={apply:.6g} gradient={gradient:.6g}"
    )


def times_over_network(contender: Contender, batch: int, replicas: int, size_bytes: int) -> Times:
    """Return the same times where a network says how long messages take, and A is sent once to each replica.

    On each host are a replica and a server; the host's link carries one slice of an A or a Δ at a time. The model that
    learns is smaller than the one whose times these are, so links are as much slower.
    """
    compute = batch * SAMPLE_S
    # All servers share an update, so it is said for one; a copy inside a host reads and writes its memory.
    times = (
        f"compute=normal:mean={compute:.6g},std={SPREAD * compute:.6g} "
        f"apply={contender.passes * PASS_S:.6g} gradient={DELTA_PASSES * PASS_S:.6g}"
    )
    links = Links(size_bytes / (2 * PASS_S), size_bytes / TRANSFER_S, between_latency_s=LATENCY_S)
    return replace(Times.parse(times), network=Network(replicas, links))


class Result(NamedTuple):
    """What a run says."""

    time_s: float | None
    """When the test loss was at the target; None: not before the limit."""
    history: Sequence[Record]
    updates: int


def run(
    name: str,
    setting: Setting,
    replicas: int,
    seed: int,
    *,
    servers: int | None = None,
    data: Path | None = None,
    seconds: float | None = None,
    alone_s: float = 0.0,
) -> Result:
    """Train a contender.

    Args:
        name: of the contender.
        setting: with which.
        replicas: their number.
        seed: of A_0, of the order of data and of all times.
        servers: over which A is divided; None: one on the host of each replica.
        data: folder of MNIST; None: digits.
        seconds: to train for, evaluated 40 times; None: until the target or the limit.
        alone_s: how long one replica trains alone before the others join (the paper's warm start).
    """
    contender, program = CONTENDERS[name], problem(seed, data)
    inputs, targets = as_tensors(program.train)  # type: ignore[misc]
    samples, policy, batch = len(targets), contender.policy, setting.size
    if contender.whole:
        policy, batch = f"{policy}:portions={batch * replicas}", samples // (batch * replicas)
    options = {"lr": setting.rate / replicas**contender.divided}
    if setting.history:
        options["history_size"] = setting.history
    optimizer = functools.partial(contender.optimizer, **options)
    # All replicas together take no more than the data in one round: for large rounds they are there several times over.
    copies = -(-batch * replicas // samples)
    train_set = (inputs.repeat(copies, 1), targets.repeat(copies))
    program = replace(program, optimizer=optimizer, batch_size=batch, train=train_set)
    most = seconds or limit_s(replicas, servers or replicas) * (samples / 1024)
    settings: dict[str, Any] = {
        "engine": "virtual",
        "times": times_of(contender, batch, replicas, servers or replicas),
        "evaluate_every": most / (40 if seconds else POINTS),
        "progress": False,
    }
    if seconds is None:
        settings["until"] = f"test_loss<={TARGET}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            if alone_s:
                settings |= {"checkpoint": Path(folder) / "alone"}
                train(program, f"replicas=1 aggregation={policy}", seconds=alone_s, **settings)
                settings |= {"resume": True}
            found = train(program, f"replicas={replicas} aggregation={policy}", seconds=most, **settings)
    except NonFiniteError:
        return Result(None, [], 0)
    if found.summary["interrupted"]:
        raise KeyboardInterrupt("a run that was interrupted has no row")
    reached = (each.time_s for each in found.history if each.test_loss is not None and each.test_loss <= TARGET)
    return Result(next(reached, None), found.history, found.summary["updates"])


def seconds_over_ideal(policy: str, portions: int, batches: int = 20) -> float:
    """Return the seconds of a batch over the ideal, where the last of 8 replicas takes 5 s for a portion, not 1 s.

    Ideal is that all replicas compute all the time: portions / (7 + 1/5).
    """
    program = load_program("synthetic", data=None, seed=0, batch_size=1)
    found = train(
        program,
        f"replicas=8 aggregation={policy}",
        engine="virtual",
        times="compute=1 transfer=0 apply=0 gradient=0",
        delay="fraction=0.125 4",
        steps=batches,
        evaluate_every=batches,
        progress=False,
    )
    return found.history[-1].time_s / batches / (portions / 7.2)


def batch_s(portions: int, replicas: int, *, network: bool, backups: bool = True, slow: bool = False) -> float:
    """Return the mean seconds of a batch of Sandblaster L-BFGS, of as many as it takes to the target.

    Args:
        portions: for each replica.
        replicas: their number.
        network: whether A and Δs go over a network, which sends a replica A once a batch; else each is a transfer.
        backups: whether who is free computes what another has not finished.
        slow: whether an eighth of the replicas take five times as long for a sample.
    """
    batches = 8
    contender, program = CONTENDERS["Sandblaster L-BFGS"], problem(0)
    batch = len(as_tensors(program.train)[1]) // (portions * replicas)  # type: ignore[index]
    times: str | Times = times_of(contender, batch, replicas, replicas)
    if network:
        size_bytes = sum(each.nbytes for each in program.build().parameters())
        times = times_over_network(contender, batch, replicas, size_bytes)
    found = train(
        replace(program, optimizer=contender.optimizer, batch_size=batch),
        f"replicas={replicas} aggregation=sandblaster:portions={portions * replicas},backups={str(backups).lower()}",
        engine="virtual",
        times=times,
        delay=f"fraction=0.125 {4 * batch * SAMPLE_S:.6g}" if slow else None,
        steps=batches,
        evaluate_every=batches,
        progress=False,
    )
    return found.history[-1].time_s / batches
