"""A published row as a shape, an arrangement and a cluster; what its columns leave open is chosen by rules stated here.

- Whether a model is gated, tied, has fewer heads of keys, or learned positions is not in the columns: what brings its
  parameters nearest to ``n_params`` is taken.
- Without layers, a model has the shape that Megatron's table (2104.04473, table 1) has for so many parameters.
- Micro-batches follow from ``gbs / (dp · mbs)`` where ``ga`` is blank.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil, log2

from paceline.plan.base import Arrangement, Numerics, Recomputed
from paceline.plan.calibration.rows import GIB, Row
from paceline.plan.cluster import Cluster, Described, Device, Links
from paceline.plan.clusters.devices import SHEETS, Sheet
from paceline.plan.shapes.shape import Shape

TABLE = ((24, 2304, 24), (30, 3072, 32), (36, 4096, 32), (40, 6144, 48), (48, 8192, 64), (60, 10240, 80),
         (80, 12288, 96), (96, 16384, 128), (105, 20480, 128), (128, 25600, 160))  # fmt: skip
"""Layers, hidden and heads of Megatron's table."""


def shape(row: Row) -> Shape | None:
    """Of the model; None: it is no transformer of blocks that are alike, or nothing is known of it."""
    layers, hidden = row.whole("layers", 0), row.whole("hidden", 0)
    if layers and hidden:
        return _nearest(row, layers, hidden, _heads(hidden, row.whole("heads", max(1, hidden // 128))))
    many = row.number("n_params")
    if not many or not row.number("seq"):
        return None
    return _nearest(row, *min(TABLE, key=lambda each: abs(12 * each[0] * each[1] ** 2 - many)))


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
    stages = max(1, min(stages, devices // (shards * context)))
    replicas = max(1, devices // (shards * stages * context))
    micro_batch, micro_batches = _micro_batches(row, replicas)
    return Arrangement(
        replicas,
        stages,
        shards,
        chunks=row.whole("vpp", 1),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        schedule="gpipe" if row.text("schedule").startswith("gpipe") else "1f1b",
        divided=int(row.number("zero") or 0),
        recompute=recompute(row),
        sequence_divided=shards > 1 and sequence_divided(row),
        next_to_shards="replicas",
        context=context,
        experts=row.whole("ep", 1),
    )


def _divided(row: Row) -> tuple[int, int]:
    """t and p; where neither is told, nor how many replicas there are, as many as parameters need, in a host first."""
    if any(row.text(column) for column in ("tp", "pp", "dp")):
        return row.whole("tp", 1), row.whole("pp", 1)
    needed = (row.number("n_params") or 0.0) * _STATES / device(row).memory_bytes
    workers = 2 ** max(0, ceil(log2(max(needed, 1.0))))
    shards = min(workers, row.whole("dev_per_node", 8))
    return shards, workers // shards


_STATES = 18 / 0.6
"""Bytes of each parameter's states, of the part of memory that is left to them."""


def _micro_batches(row: Row, replicas: int) -> tuple[float, int]:
    """b and m: as told, or by the rule b · m · R = B."""
    batch, b, m = row.number("gbs"), row.number("mbs"), row.number("ga")
    if batch and not b:
        b, m = min(batch / replicas, 1 if row.whole("pp", 1) > 1 else _LIKELY), None
    if batch and b:
        m = batch / replicas / b
    return b or 1.0, max(1, round(m or 1))


_LIKELY = 4
"""Samples of a micro-batch where a row does not tell and there is one stage; with several it is taken for one."""


def recompute(row: Row) -> Recomputed:
    """By the first word."""
    text = row.text("recompute")
    return "full" if text.startswith("full") else "selective" if text.startswith("selective") else "none"


def newer(row: Row) -> bool:
    """Whether a framework of 2023 or later: sums gradients while it computes, and attention never writes its scores."""
    return row.framework not in _OLDER or row.source.startswith("mcore")


_OLDER = ("Megatron-DeepSpeed", "Megatron-LM", "TensorFlow+Horovod", "PyTorch")


def sequence_divided(row: Row) -> bool:
    """Whether shards divide what lies between operators as well: newer ones do, and whoever says so."""
    return newer(row) or "seqpar" in row.text("recompute")


def precision(row: Row) -> str:
    """In Paceline's words.

    >>> [precision(Row({"precision": text})) for text in ("fp16", "amp_bf16", "MXFP8", "NVFP4", "tf32", "")]
    ['fp16-mixed', 'bf16-mixed', 'fp8-mixed', 'fp4-mixed', 'tf32', 'fp16-mixed']
    """
    text = row.text("precision").lower()
    for name, found in _PRECISIONS.items():
        if name in text:
            return found
    return "fp16-mixed"


_PRECISIONS = {"fp8": "fp8-mixed", "float8": "fp8-mixed", "fp4": "fp4-mixed", "bf16": "bf16-mixed",
               "fp16": "fp16-mixed", "tf32": "tf32", "fp32": "fp32"}  # fmt: skip


def numerics(row: Row, divided: int) -> Numerics:
    """Megatron keeps gradients in full precision, FSDP a single copy of parameters.

    DeepSpeed keeps gradients in half; ZeRO makes a copy in full of those that a worker updates (its stage_1_and_2.py,
    ``single_grad_partition``).
    """
    told = precision(row)
    if told in ("fp32", "tf32"):
        return Numerics(4, 4, 8)
    if row.framework == "Megatron-DeepSpeed":
        return Numerics(2, 2, 16 if divided else 12)
    return Numerics(2, 4, 10) if divided == 3 else Numerics(2, 4, 12)


def sheet(row: Row) -> Sheet | None:
    """Of its device; None: a family without one."""
    found = [each for name, each in SHEETS.items() if name.upper().startswith(row.family)] if row.family else []
    memory = (row.number("gpu_mem_gb") or 0) * GIB
    return min(found, key=lambda each: abs(each.memory_bytes - memory)) if found else None


def device(row: Row) -> Device:
    """By what the row says, by its data sheet where it doesn't, or else an A100's."""
    known = sheet(row) or SHEETS["A100-80GB"]
    told = precision(row)
    peak = (row.number("peak_tflops") or 0) * 1e12
    base = known.flops_per_s.get("bf16") or max(known.flops_per_s.values())
    peak = peak or known.flops_per_s.get(told.removesuffix("-mixed"), base)
    if told in ("fp8-mixed", "fp4-mixed"):
        peak = max(peak, known.flops_per_s.get(told.removesuffix("-mixed"), 0.0))
    memory = (row.number("gpu_mem_gb") or 0) * GIB or known.memory_bytes
    return Device(row.text("hw"), peak, memory, known.memory_bytes_per_s, {}, known.multiprocessors)


def cluster(row: Row) -> Cluster:
    """Hosts with links as told, or as usual beside its device."""
    known = sheet(row) or SHEETS["A100-80GB"]
    per_host = row.whole("dev_per_node", known.devices_per_host)
    devices = row.whole("n_devices", arrangement(row).workers)
    inside = (row.number("intra_bw_GBps") or 0) * 1e9 or known.inside_bytes_per_s
    between = (row.number("inter_bw_GBps_per_dev") or 0) * 1e9 or known.between_bytes_per_s
    return Cluster(-(-devices // per_host), per_host, device(row), Described(Links(inside, between)))
