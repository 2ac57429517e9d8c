"""A published row as a shape and an arrangement; what its columns leave open is chosen by rules stated here.

- Whether a model is gated, tied, has fewer heads of keys, or learned positions is not in the columns: what brings its
  parameters nearest to ``n_params`` is taken.
- Without layers, a model has the width that Megatron's table (2104.04473, table 1) has for so many parameters, and as
  many layers as make them up. How many it has may stand in its name, if it is no mixture of experts.
- Micro-batches follow from ``gbs / (dp · mbs)`` where ``ga`` is blank.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import gcd, log2

from paceline.plan.base import Arrangement
from paceline.plan.calibration import frameworks, machines, work
from paceline.plan.calibration.rows import Row
from paceline.plan.shapes.shape import Shape

TABLE = ((24, 2304, 24), (30, 3072, 32), (36, 4096, 32), (40, 6144, 48), (48, 8192, 64), (60, 10240, 80),
         (80, 12288, 96), (96, 16384, 128), (105, 20480, 128), (128, 25600, 160))  # fmt: skip
"""Layers, hidden and heads of Megatron's table."""


def shape(row: Row) -> Shape | None:
    """Of the model; None: it is no transformer of blocks that are alike, or nothing is known of it."""
    layers, hidden = row.whole("layers", 0), row.whole("hidden", 0)
    if layers and hidden:
        return _nearest(row, layers, hidden, _heads(hidden, row.whole("heads", max(1, hidden // 128))))
    many = row.number("n_params") or work.dense(row)
    if not many or not row.number("seq"):
        return None
    layers, hidden, heads = min(TABLE, key=lambda each: abs(log2(12 * each[0] * each[1] ** 2 / many)))
    return _nearest(row, max(1, round(many / (12 * hidden**2))), hidden, heads)


def _heads(hidden: int, told: int) -> int:
    """As told, or the nearest number that goes into hidden: some rows' heads were guessed by who wrote them down."""
    return min((many for many in range(1, hidden + 1) if hidden % many == 0), key=lambda many: abs(many - told))


def _nearest(row: Row, layers: int, hidden: int, heads: int) -> Shape:
    """Of all that the columns leave open; the plain one where parameters are not told or are near enough."""
    many = row.number("n_params") or 0.0
    plain, *others = _open(row, layers, hidden, heads)
    near = min(others, key=lambda each: abs(each.parameters - many))
    return near if abs(near.parameters - many) < _NEAR * many < abs(plain.parameters - many) else plain


_NEAR = 0.03
"""Of n_params: they are often rounded to two digits."""


def _open(row: Row, layers: int, hidden: int, heads: int) -> Iterator[Shape]:
    plain = Shape(
        layers,
        hidden,
        heads,
        row.whole("ffn", 4 * hidden),
        row.whole("vocab", 50257),
        row.whole("seq", 512 if "bert" in row.model.lower() else 1024),
        name=row.model,
    )
    yield plain
    yield replace(plain, tied=False)
    for tied, groups in product((False, True), (0, 8)):
        if not groups or heads % groups == 0:
            yield replace(plain, gated=True, tied=tied, kv_heads=groups, positions=False)


def arrangement(row: Row) -> Arrangement:
    """How it was divided; replicas are as many as there are devices for."""
    shards, stages = _divided(row)
    context = row.whole("cp", 1)
    devices = row.whole("n_devices", row.whole("dp", 1) * shards * stages * context)
    parts = row.whole("layers", MOST_PARTS)
    stages = max(1, min(stages, devices // (shards * context), parts))
    replicas = max(1, devices // (shards * stages * context))
    micro_batch, micro_batches = _micro_batches(row, replicas, stages)
    return Arrangement(
        replicas,
        stages,
        shards,
        chunks=max(1, min(row.whole("vpp", 1), parts // stages)),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        schedule="gpipe" if row.text("schedule").startswith("gpipe") else "1f1b",
        divided=min(3, int(row.number("zero") or 0)),
        recompute=frameworks.recompute(row),
        sequence_divided=shards > 1 and frameworks.sequence_divided(row),
        next_to_shards="replicas",
        context=context,
        experts=row.whole("ep", 1),
    )


MOST_PARTS = 1000
"""Of a model whose layers are not told."""


def _divided(row: Row) -> tuple[int, int]:
    """t and p; where neither is told, nor how many replicas there are, as many as parameters need, in a host first, of
    those that leave no device out."""
    if any(row.text(column) for column in ("tp", "pp", "dp")):
        return row.whole("tp", 1), row.whole("pp", 1)
    needed = (row.number("n_params") or 0.0) * _STATES / machines.device(row).memory_bytes
    devices, per_host = row.whole("n_devices", 1), row.whole("dev_per_node", 8)
    shards = next(t for t in _divisors(gcd(devices, per_host)) if t >= min(needed, gcd(devices, per_host)))
    stages = next((p for p in _divisors(devices // shards) if p * shards >= needed), devices // shards)
    return shards, stages


def _divisors(of: int) -> list[int]:
    return [each for each in range(1, of + 1) if of % each == 0]


_STATES = 18 / 0.6
"""Bytes of each parameter's states, of the part of memory that is left to them."""


def _micro_batches(row: Row, replicas: int, stages: int) -> tuple[float, int]:
    """b and m: as told, or by the rule b · m · R = B."""
    batch, b, m = row.number("gbs"), row.number("mbs"), row.number("ga")
    if batch and not b:
        b, m = min(batch / replicas, _likely(row, batch / replicas, stages)), None
    if batch and b:
        m = batch / replicas / b
    return b or 1.0, max(1, round(m or 1))


def _likely(row: Row, samples: float, stages: int) -> float:
    """b where a row does not tell: torchtitan makes as many micro-batches as there are stages (its default of
    ``pipeline_parallel_microbatches``), others as small ones as can be; without stages a few samples."""
    if stages == 1:
        return _FEW
    return samples / stages if row.framework == frameworks.TITAN else 1.0


_FEW = 4.0
