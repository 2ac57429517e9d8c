"""The collectives in rounds, on tensors flattened to contiguous vectors; each yields what it waits for.

Reductions have two phases, chunk after chunk, so that each rank reduces one slice of N::

    round    0              1                         2                 ...
    shown    slices of      slices of chunk 1,        slices of chunk 2,
             chunk 0        results of chunk 0        results of chunk 1
    read     my slice 0     my slice 1, results 0     my slice 2, results 1

A rank does not show its own slice: its place on the stage takes the result. Small vectors are reduced by all ranks
alike, which saves a round.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise, product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.comm.shm.region import OTHERWISE, StagedRounds, Steps, fingerprint
from paceline.core.errors import CollectiveError, InputError

# Bytes that all ranks together may show for each of them to reduce all of it; above, a second round is faster.
#
# On 2 idle cores of an Intel Xeon, at once against in slices: 2 ranks 53 to 71 µs for 256 KiB, 102 to 108 for 512;
# 4 ranks 199 to 233 for 128 KiB, 403 to 329 for 256 (medians of 10 alternating turns of 150 calls).
AT_ONCE_BYTES = 512 * 1024

# Takes a piece of a reduction, which begins so many elements into it; the piece's memory is written again afterwards.
Taken: TypeAlias = Callable[[int, Tensor], None]

# Pieces of reductions begin at multiples of so many elements: kernels that vectorise round their last ones otherwise.
ALIGNED = 64

# Bytes of a round in which one rank alone shows something: all N stages would hold more, but not the caches.
BROADCAST_BYTES = 2**20


# How two elements are reduced, by the names of torch.distributed.ReduceOp.
RULES: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def rule_of(op: Any) -> str:
    """Return the rule of a ``torch.distributed.ReduceOp``.

    Raises:
        InputError: backend shm has no such rule.

    >>> rule_of(torch.distributed.ReduceOp.SUM)
    'sum'
    """
    name = getattr(op, "op", op).name
    if name.lower() not in RULES:
        raise InputError(
            f"reduce operation {name} is not known to backend shm; write one of {', '.join(map(str.upper, RULES))}"
        )
    return str(name.lower())


@cache
def check_rule(rule: str, dtype: torch.dtype) -> None:
    """Raise InputError if elements of a dtype can't be reduced by a rule."""
    try:
        probe = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
        RULES[rule](probe, probe, out=probe)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error)
    else:
        if rule != "avg" or dtype.is_floating_point or dtype.is_complex:
            return
        reason = "a mean of whole numbers is none"
    raise InputError(
        f"{rule} of {str(dtype).removeprefix('torch.')} can't be had ({reason}); convert the tensor first, as by "
        "x.float()"
    )


def _reduce(parts: Sequence[Tensor], rule: str, out: Tensor) -> None:
    """Reduce the parts, elementwise, into ``out``, which may be one of the first two."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    # In ascending order of ranks, whichever rank does it: sums of floats then have the same bits on all of them.
    combine = RULES[rule]
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    if rule == "avg":
        out.div_(len(parts))


def plain(x: Tensor) -> bool:
    """Return whether a tensor's vector is its own memory."""
    return x.is_contiguous() and not (x.is_conj() or x.is_neg())


def vector(x: Tensor) -> Tensor:
    """Flatten a tensor; the result is the tensor's own memory if that is contiguous.

    Raises:
        InputError: it is not a dense CPU tensor.
    """
    if not x.is_cpu:
        raise InputError(f"backend shm carries CPU tensors, and this one is on {x.device}; {OTHERWISE}")
    if x.layout is not torch.strided or x.is_quantized:
        raise InputError(f"backend shm carries dense tensors, and this one is {x.layout}; write x.to_dense()")
    v = x.data  # the version counter of a tensor that autograd has saved must not change, as in all other backends
    if not plain(v):
        v = v.contiguous().resolve_conj().resolve_neg()
    return v if v.dim() == 1 else v.view(-1)


def written_back(steps: Steps, tensors: Sequence[Tensor], vectors: Sequence[Tensor]) -> Steps:
    """Return the same steps, after which results in vectors that are copies are written to their tensors."""
    return steps if all(map(plain, tensors)) else _write_back(steps, zip(tensors, vectors, strict=True))


def _write_back(steps: Steps, pairs: Iterable[tuple[Tensor, Tensor]]) -> Steps:
    yield from steps
    for x, v in pairs:
        if not plain(x):
            x.data.copy_(v.view(x.shape))


def cut(whole: Tensor, parts: int, name: str, sizes: Sequence[int] | None = None, rows: int = 0) -> list[Tensor]:
    """Cut a vector into equal parts, or, if ``sizes`` are given, into parts of so many of its rows.

    Raises:
        InputError: it can't be cut so.
    """
    if not sizes:
        if whole.numel() % parts:
            raise InputError(
                f"{name}: {whole.numel():,} elements can't be cut into {parts} equal parts; pad the tensor"
            )
        return list(whole.view(parts, whole.numel() // parts).unbind())
    if len(sizes) != parts or sum(sizes) != rows:
        raise InputError(f"{name}: sizes {list(sizes)} must be {parts}, one a rank, and add up to the {rows} rows")
    row = whole.numel() // rows if rows else 0
    ends = list(accumulate((size * row for size in sizes), initial=0))
    return [whole[start:end] for start, end in pairwise(ends)]


def _starts(elements: int, per_round: int) -> range:
    """Return where each round's chunk of a vector starts; an empty one has one too, since all ranks must post."""
    return range(0, max(elements, 1), per_round)


def _slot(stage: Tensor, slot: int, rank: int, part: Tensor) -> Tensor:
    """Return the place of a rank's part on a stage that is cut into slots."""
    return stage[rank * slot : rank * slot + part.numel()]


def broadcast(rounds: StagedRounds, x: Tensor, root: int) -> Steps:
    """Replace ``x`` by the root's ``x``, on all ranks."""
    header = fingerprint("broadcast", x.dtype, x.numel(), root=root)
    per_round = min(rounds.stage_bytes * rounds.size, BROADCAST_BYTES) // x.element_size()
    for start in _starts(x.numel(), per_round):
        chunk = x[start : start + per_round]
        stage = rounds.joint(x.dtype)[: chunk.numel()]
        if rounds.rank == root:
            stage.copy_(chunk)
        yield from rounds.barrier(header if start == 0 else None)
        if rounds.rank != root:
            chunk.copy_(stage)


def all_reduce(rounds: StagedRounds, x: Tensor, out: Tensor, rule: str) -> Steps:
    """Write the reduction of all ranks' ``x`` to ``out``; ``x`` stays as it is unless both are one."""
    header = fingerprint("all_reduce", x.dtype, x.numel(), rule=rule)
    if rounds.size > 1 and _is_small(rounds, x):
        return _reduce_at_once(rounds, header, x, rule, out)
    if rounds.size == 1:
        if out is not x:
            out.copy_(x)
        return iter(())
    return _reduce_in_slices(rounds, header, x, rule, out)


def reduce(rounds: StagedRounds, x: Tensor, root: int, rule: str) -> Steps:
    """Replace the root's ``x`` by the reduction of all ranks' ``x``; on other ranks it stays as it is."""
    if rounds.size == 1:  # its own reduction, of any number of bytes
        return iter(())
    header = fingerprint("reduce", x.dtype, x.numel(), root=root, rule=rule)
    out = x if rounds.rank == root else None
    if _is_small(rounds, x):
        return _reduce_at_once(rounds, header, x, rule, out)
    return _reduce_in_slices(rounds, header, x, rule, out)


def _is_small(rounds: StagedRounds, x: Tensor) -> bool:
    return x.numel() * x.element_size() <= min(AT_ONCE_BYTES // rounds.size, rounds.stage_bytes)


def _reduce_at_once(rounds: StagedRounds, header: bytes, x: Tensor, rule: str, out: Tensor | None) -> Steps:
    shown = rounds.stages(x.dtype, x.numel())
    shown[rounds.rank].copy_(x)
    yield from rounds.barrier(header)
    if out is not None:
        _reduce(shown, rule, out)


def _reduce_in_slices(rounds: StagedRounds, header: bytes, x: Tensor, rule: str, out: Tensor | None) -> Steps:
    rank, size = rounds.rank, rounds.size
    slot = rounds.stages(x.dtype)[0].numel() // size
    before: list[Tensor] = []  # places of the chunk whose results are shown in this round
    for start in [*_starts(x.numel(), slot * size), None]:
        stages, slices, places = rounds.stages(x.dtype), list[Tensor](), list[Tensor]()
        if start is not None:
            slices = _slices(x[start : start + slot * size], size)
            places = [] if out is None else _slices(out[start : start + slot * size], size)
        for other, part in enumerate(slices):
            if other != rank:
                _slot(stages[rank], slot, other, part).copy_(part)
        yield from rounds.barrier(header if start == 0 else None)
        for other, place in enumerate(before):
            if other != rank:
                place.copy_(_slot(stages[other], slot, other, place))
        if slices:
            own = slices[rank]
            parts = [_slot(stage, slot, rank, own) for stage in stages]
            parts[rank] = own
            # The stages of the next round: the others read the result there after its barrier.
            result = _slot(rounds.stages(x.dtype)[rank], slot, rank, own)
            _reduce(parts, rule, result)
            if places:
                places[rank].copy_(result)
        before = places


def _slices(chunk: Tensor, size: int) -> list[Tensor]:
    """Cut a chunk into one slice a rank, as equal as can be: the last ones are shorter or empty."""
    each = -(-chunk.numel() // size)
    return [chunk[i * each : (i + 1) * each] for i in range(size)]


def reduce_scatter(rounds: StagedRounds, out: Tensor | Taken, parts: Sequence[Tensor], rule: str) -> Steps:
    """Write the reduction of all ranks' part for this rank to ``out``; or call that with one piece after the other."""
    rank, sizes, dtype = rounds.rank, tuple(part.numel() for part in parts), parts[0].dtype
    header = fingerprint("reduce_scatter", dtype, rule=rule, sizes=sizes)
    slot = rounds.stages(dtype)[0].numel() // rounds.size
    slot = slot // ALIGNED * ALIGNED or slot
    for start in _starts(max(sizes), slot):
        stages = rounds.stages(dtype)
        for other, part in enumerate(parts):
            if other != rank:
                chunk = part[start : start + slot]
                _slot(stages[rank], slot, other, chunk).copy_(chunk)
        yield from rounds.barrier(header if start == 0 else None)
        own = parts[rank][start : start + slot]
        shown = [_slot(stage, slot, rank, own) for stage in stages]
        place, shown[rank] = shown[rank], own
        if not isinstance(out, Tensor):
            if own.numel():
                _reduce(shown, rule, place)
                out(start, place)
            continue
        result = out[start : start + slot]
        if rank > 1 and result.data_ptr() == own.data_ptr():  # it would be written before it is read
            _reduce(shown, rule, place)
            result.copy_(place)
        else:
            _reduce(shown, rule, result)


def all_gather(rounds: StagedRounds, outs: Sequence[Tensor], x: Tensor) -> Steps:
    """Write each rank's ``x`` to ``outs[rank]``."""
    if any(out.numel() != x.numel() for out in outs):
        return exchange(rounds, "all_gather", outs, [x] * rounds.size)
    return gather(rounds, outs, x, None)


def gather(rounds: StagedRounds, outs: Sequence[Tensor], x: Tensor, root: int | None) -> Steps:
    """Write each rank's ``x`` to the root's ``outs[rank]``, or to all ranks' without one; others give no ``outs``."""
    header = fingerprint("all_gather" if root is None else "gather", x.dtype, x.numel(), root=root)
    per_round = rounds.stages(x.dtype)[0].numel()
    for start in _starts(x.numel(), per_round):
        stages, chunk = rounds.stages(x.dtype), x[start : start + per_round]
        stages[rounds.rank][: chunk.numel()].copy_(chunk)
        yield from rounds.barrier(header if start == 0 else None)
        for stage, out in zip(stages, outs, strict=False):
            out[start : start + per_round].copy_(stage[: chunk.numel()])


def scatter(rounds: StagedRounds, out: Tensor, parts: Sequence[Tensor], root: int) -> Steps:
    """Write the root's part for this rank to ``out``; other ranks give no ``parts``."""
    header = fingerprint("scatter", out.dtype, out.numel(), root=root)
    per_round = rounds.stages(out.dtype)[0].numel()
    for start in _starts(out.numel(), per_round):
        stages, chunk = rounds.stages(out.dtype), out[start : start + per_round]
        for stage, part in zip(stages, parts, strict=False):
            stage[: chunk.numel()].copy_(part[start : start + per_round])
        yield from rounds.barrier(header if start == 0 else None)
        chunk.copy_(stages[rounds.rank][: chunk.numel()])


def exchange(rounds: StagedRounds, call: str, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
    """Write each rank's part for this one to ``outs[rank]``; sizes may differ from pair to pair.

    Raises:
        CollectiveError: a rank expects another size than it is given; on all ranks alike.
    """
    rank, dtype, all_sizes, words = rounds.rank, parts[0].dtype, rounds.sizes(), 2 * rounds.size
    own_sizes = array("q", [*(part.numel() for part in parts), *(out.numel() for out in outs)])
    all_sizes[rank * words : (rank + 1) * words] = memoryview(own_sizes)
    header = fingerprint(call, dtype)
    slot = rounds.stages(dtype)[0].numel() // rounds.size
    start, longest = 0, 1
    while start < longest:
        stages = rounds.stages(dtype)
        for other, part in enumerate(parts):
            if other != rank:
                chunk = part[start : start + slot]
                _slot(stages[rank], slot, other, chunk).copy_(chunk)
        yield from rounds.barrier(header if start == 0 else None)
        if start == 0:
            longest = _longest_part(rounds, all_sizes.tolist())
        for other, (stage, out) in enumerate(zip(stages, outs, strict=True)):
            if other != rank:
                chunk = out[start : start + slot]
                chunk.copy_(_slot(stage, slot, rank, chunk))
        start += slot
    outs[rank].copy_(parts[rank])


def _longest_part(rounds: StagedRounds, sizes: list[int]) -> int:
    """Compare the sizes of all parts with those that are expected, and return the largest."""
    size, region = rounds.size, rounds.region
    if sizes.count(sizes[0]) == len(sizes):
        return sizes[0]
    for source, destination in product(range(size), repeat=2):
        given, expected = sizes[source * 2 * size + destination], sizes[destination * 2 * size + size + source]
        if given != expected:
            raise CollectiveError(
                f"in group {region.name} {region.named([source])} gives {given:,} elements to "
                f"{region.named([destination])}, which expects {expected:,}; make both the same"
            )
    return max(sizes)


def sparse_all_reduce(rounds: StagedRounds, x: Tensor) -> Steps:
    """Replace a sparse ``x`` by the coalesced sum of all ranks' ``x``, which all ranks gather and add."""
    own = x.coalesce()
    indices, values = own.indices(), own.values()
    counts = torch.empty(rounds.size, dtype=torch.int64)
    yield from all_gather(rounds, counts.view(-1, 1).unbind(), torch.tensor([values.shape[0]]))
    all_indices = [indices.new_empty(len(indices), count) for count in counts.tolist()]
    all_values = [values.new_empty(count, *values.shape[1:]) for count in counts.tolist()]
    for outs, part in ((all_indices, indices), (all_values, values)):
        vectors = [out.view(-1) for out in outs]
        yield from exchange(rounds, "all_gather", vectors, [part.contiguous().view(-1)] * rounds.size)
    # In the order of ranks, so that coalescing adds them in the same order on all of them.
    whole = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), x.shape, check_invariants=False)
    with torch.no_grad():
        x.copy_(whole.coalesce())
