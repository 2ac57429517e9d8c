"""A published row as a shape, a cluster and an arrangement; what its columns leave open is chosen by rules stated here.

- Devices are as the columns say, and by data sheets where they are blank.
- Whether a model is gated, tied, has fewer heads of keys, or learned positions is not in the columns: what brings its
  parameters nearest to ``n_params`` is taken.
- Without layers, a model has the width that Megatron's table (2104.04473, table 1) has for so many parameters, and as
  many layers as make them up. How many it has may stand in its name, if it is no mixture of experts.
- Micro-batches follow from ``gbs / (dp · mbs)`` where ``ga`` is blank.
"""

from dataclasses import replace
from itertools import product
from math import gcd, log2
from typing import Literal

from paceline.clock.cluster_file import Links
from paceline.planner.base import Arrangement, Numerics, divisors
from paceline.planner.calibration import rows
from paceline.planner.calibration.rows import GIB, PublishedRow
from paceline.planner.cluster import Cluster, Described, Device
from paceline.planner.devices import SHEETS, Sheet
from paceline.planner.shapes.gemm_time import DeviceEfficiency
from paceline.planner.shapes.shape import Shape, nearest_divisor


def newer(row: PublishedRow) -> bool:
    """Return whether the framework is of 2023 or later, on a newer device: it sums gradients while it computes."""
    return (row.framework not in _OLDER or row.source.startswith("mcore")) and row.family not in _EARLIER


_OLDER = ("Megatron-DeepSpeed", "Megatron-LM", "TensorFlow+Horovod", "PyTorch")
# Devices from before the A100, which FlashAttention (2307.08691) needs.
_EARLIER = ("V100", "P100", "P40", "T4", "A64FX")


def kernels(row: PublishedRow) -> DeviceEfficiency:
    """Return how a framework uses its device: newer ones never write attention's scores and keep no copy of logits in
    full precision; torchtitan, with PyTorch's own loss, does."""
    fused = newer(row)
    titan = row.framework == TITAN
    return DeviceEfficiency(fused_scores=fused, every_second=titan, fused_loss=fused and not titan, plain_loss=titan)


TITAN = "torchtitan"


def plain_modules(row: PublishedRow) -> bool:
    """Return whether a framework runs a module as it is written, as Paceline does, without layers of its own.

    >>> [plain_modules(PublishedRow({"framework": name})) for name in ("torchtitan (FSDP2)", "NeMo/Megatron-Core")]
    [True, False]
    """
    return not any(name in row.text("framework") for name in _OWN_KERNELS)


# Frameworks with layers of their own, of fused kernels.
_OWN_KERNELS = ("Megatron", "NeMo")


def adds_in_products(row: PublishedRow) -> bool:
    """Return whether a matrix product adds the gradient that it makes to those before: Megatron's own, not DeepSpeed's.

    >>> [adds_in_products(PublishedRow({"framework": name})) for name in ("NeMo/Megatron-Core", "Megatron-DeepSpeed")]
    [True, False]
    """
    return "Megatron" in row.text("framework") and "DeepSpeed" not in row.text("framework")


def precision(row: PublishedRow) -> str:
    """Return the precision in Paceline's terms.

    >>> [precision(PublishedRow({"precision": text})) for text in ("fp16", "amp_bf16", "MXFP8", "NVFP4", "tf32", "")]
    ['fp16-mixed', 'bf16-mixed', 'fp8-mixed', 'fp4-mixed', 'tf32', 'fp16-mixed']
    """
    text = row.text("precision").lower()
    return next((value for name, value in _PRECISIONS.items() if name in text), "fp16-mixed")


def known_precision(row: PublishedRow) -> bool:
    """Return whether a row's precision has a name here.

    >>> [known_precision(PublishedRow({"precision": text})) for text in ("amp_bf16", "mixed", "FP8-MX", "int4")]
    [True, True, True, False]
    """
    return any(name in row.text("precision").lower() for name in (*_PRECISIONS, *_HALF))


# Other words for half precision: BFLOAT16 and FLOAT16, automatic mixed precision (amp).
_HALF = ("mixed", "amp", "float16", "half")
_PRECISIONS = {"fp8": "fp8-mixed", "float8": "fp8-mixed", "fp4": "fp4-mixed", "bf16": "bf16-mixed",
               "fp16": "fp16-mixed", "tf32": "tf32", "fp32": "fp32"}  # fmt: skip


def numerics(row: PublishedRow, at: Arrangement) -> Numerics:
    """Return the bytes of a parameter's states by framework.

    Megatron keeps gradients in full precision, FSDP one copy of parameters.

    DeepSpeed keeps gradients in half; ZeRO makes a copy in full of those that a worker updates (its stage_1_and_2.py,
    ``single_grad_partition``), and without ZeRO they are laid out once more to be summed (its engine.py,
    ``buffered_allreduce_fallback``). With stages torchtitan brings parameters together once a step, and keeps gradients
    of all until the last micro-batch in addition to the divided ones: :func:`keeps_whole`.
    """
    whole = precision(row) in ("fp32", "tf32")
    if row.framework == "Megatron-DeepSpeed":
        gradient = 4.0 if whole else 2.0
        copied = 0.0 if whole else 4.0
        # Without ZeRO gradients are copied a part at a time; none without other replicas to sum with.
        own = rows.whole(row) / at.shards / at.stages
        laid_out = min(1.0, _AT_A_TIME / own) if at.replicas > 1 else 0.0
        again = copied if at.divided else gradient * laid_out
        return Numerics(gradient, gradient, (8 if whole else 12) + again)
    if whole:
        return Numerics(4, 4, 8)
    if keeps_whole(row):
        return Numerics(2, 4, 16)
    return Numerics(2, 4, 10) if at.divided == 3 else Numerics(2, 4, 12)


# Elements: DeepSpeed's elements_per_buffer.
_AT_A_TIME = 5e8


def keeps_whole(row: PublishedRow) -> bool:
    """Return whether divided parameters stay gathered for a whole step: torchtitan's do where there are stages."""
    return row.framework == TITAN and row.whole("pp", 1) > 1


def sheet(row: PublishedRow) -> Sheet:
    """Return the data sheet of its device, or else an A100's."""
    return sheet_of(row) or SHEETS["A100-80GB"]


def sheet_of(row: PublishedRow) -> Sheet | None:
    """Return the data sheet of its device, of several that with the nearest memory; None: it has none."""
    candidates = [each for name, each in SHEETS.items() if name.upper().startswith(row.family)] if row.family else []
    memory = (row.number("gpu_mem_gb") or 0) * GIB
    return min(candidates, key=lambda each: abs(each.memory_bytes - memory), default=None)


def plain_flops_per_s(row: PublishedRow) -> float:
    """Return the operations per second of its device, at 16 bits where it is trained with fewer."""
    plain = device(
        PublishedRow({**row.cells, "precision": "bf16"} if precision(row) in ("fp8-mixed", "fp4-mixed") else row.cells)
    )
    return min(plain.flops_per_s, device(row).flops_per_s)


def device(row: PublishedRow) -> Device:
    """Return the device as the row says, by its data sheet where it doesn't, or else an A100."""
    known, name = sheet(row), precision(row)
    peak = (row.number("peak_tflops") or 0) * 1e12
    base = known.flops_per_s.get("bf16") or max(known.flops_per_s.values())
    peak = peak or known.flops_per_s.get(name.removesuffix("-mixed"), base)
    if name in ("fp8-mixed", "fp4-mixed"):
        peak = max(peak, known.flops_per_s.get(name.removesuffix("-mixed"), 0.0))
    memory = (row.number("gpu_mem_gb") or 0) * GIB or known.memory_bytes
    kind: Literal["cpu", "cuda"] = "cpu" if row.family in HOSTS else "cuda"
    return Device(row.text("hw"), peak, memory, known.memory_bytes_per_s, {}, known.multiprocessors, kind)


# Families that are no accelerators.
HOSTS = ("A64FX", "CPU")


def cluster(row: PublishedRow, workers: int) -> Cluster:
    """Return hosts with links as the row says, or as usual for its device."""
    known = sheet(row)
    per_host = row.whole("dev_per_node", known.devices_per_host)
    devices = row.whole("n_devices", workers)
    inside = (row.number("intra_bw_GBps") or 0) * 1e9 or known.inside_bytes_per_s
    between = (row.number("inter_bw_GBps_per_dev") or 0) * 1e9 or known.between_bytes_per_s
    return Cluster(
        -(-devices // per_host), per_host, device(row), Described(Links(inside, between), unit_hosts=known.unit_hosts)
    )


# Layers, hidden and heads of Megatron's table.
TABLE = ((24, 2304, 24), (30, 3072, 32), (36, 4096, 32), (40, 6144, 48), (48, 8192, 64), (60, 10240, 80),
         (80, 12288, 96), (96, 16384, 128), (105, 20480, 128), (128, 25600, 160))  # fmt: skip


def shape(row: PublishedRow) -> Shape | None:
    """Return the shape of the model; None: it is no transformer of equal blocks, or nothing is known of it."""
    layers, hidden = row.whole("layers", 0), row.whole("hidden", 0)
    if layers and hidden:
        heads = row.whole("heads", max(1, hidden // 128))  # in some rows they were guessed
        return _nearest(row, layers, hidden, nearest_divisor(hidden, heads))
    parameters = row.number("n_params") or rows.dense(row)
    if not parameters or not row.number("seq"):
        return None
    layers, hidden, heads = min(TABLE, key=lambda each: abs(log2(12 * each[0] * each[1] ** 2 / parameters)))
    return _nearest(row, max(1, round(parameters / (12 * hidden**2))), hidden, heads)


def _nearest(row: PublishedRow, layers: int, hidden: int, heads: int) -> Shape:
    """Return the shape with the nearest parameters; the plain one if they are blank or near enough."""
    given, words = row.number("n_params") or 0.0, row.whole("seq", 512 if "bert" in row.model.lower() else 1024)
    ffn, vocab = row.whole("ffn", 4 * hidden), row.whole("vocab", 50257)
    plain = Shape(layers, hidden, heads, ffn, vocab, words, name=row.model)
    others = [replace(plain, tied=False)] + [
        replace(plain, gated=True, tied=tied, kv_heads=groups, positions=False)
        for tied, groups in product((False, True), (0, 8))
        if not groups or heads % groups == 0
    ]
    near = min(others, key=lambda each: abs(each.parameters - given))
    return near if abs(near.parameters - given) < _NEAR * given < abs(plain.parameters - given) else plain


# Of n_params: they are often rounded to two digits.
_NEAR = 0.03


def arrangement(row: PublishedRow) -> Arrangement:
    """Return how the row was divided; replicas are as many as there are devices for."""
    shards, stages = _divided(row)
    context = row.whole("cp", 1)
    devices = row.whole("n_devices", row.whole("dp", 1) * shards * stages * context)
    parts, text = row.whole("layers", MOST_PARTS), row.text("recompute")
    stages = max(1, min(stages, devices // (shards * context), parts))
    replicas = max(1, devices // (shards * stages * context))
    chunks = max(1, min(row.whole("vpp", 1), parts // stages))
    return Arrangement(
        *(replicas, stages, shards, chunks, *_micro_batches(row, replicas, stages)),
        schedule="gpipe" if row.text("schedule").startswith("gpipe") else "1f1b",
        divided=min(3, int(row.number("zero") or 0)),
        recompute="full" if text.startswith("full") else "selective" if text.startswith("selective") else "none",
        sequence_divided=shards > 1 and (newer(row) or "seqpar" in text),
        next_to_shards="replicas",
        context=context,
        experts=row.whole("ep", 1),
    )


# The limit for a model whose layers are blank.
MOST_PARTS = 1000


def _divided(row: PublishedRow) -> tuple[int, int]:
    """Return t and p; if both and the replicas are blank, as many as the parameters need, within a host first, of those
    that leave no device out."""
    if any(row.text(column) for column in ("tp", "pp", "dp")):
        return row.whole("tp", 1), row.whole("pp", 1)
    needed = (row.number("n_params") or 0.0) * _STATES / device(row).memory_bytes
    devices, per_host = row.whole("n_devices", 1), row.whole("dev_per_node", 8)
    shards = next(t for t in divisors(gcd(devices, per_host)) if t >= min(needed, gcd(devices, per_host)))
    stages = next((p for p in divisors(devices // shards) if p * shards >= needed), devices // shards)
    return shards, stages


# Bytes of each parameter's states, of the part of memory that is left to them.
_STATES = 18 / 0.6


def _micro_batches(row: PublishedRow, replicas: int, stages: int) -> tuple[float, int]:
    """Return b and m: as the row says, or by b · m · R = B.

    Where a row leaves b open: torchtitan makes as many micro-batches as there are stages (its default of
    ``pipeline_parallel_microbatches``), others as small ones as can be; without stages a few samples.
    """
    batch, b, m = row.number("gbs"), row.number("mbs"), row.number("ga")
    if batch and not b:
        samples = batch / replicas
        likely = _FEW if stages == 1 else samples / stages if row.framework == TITAN else 1.0
        b, m = min(samples, likely), None
    if batch and b:
        m = batch / replicas / b
    return b or 1.0, max(1, round(m or 1))


_FEW = 4.0
