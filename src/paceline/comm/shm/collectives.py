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
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

from paceline.comm.shm.region import OTHERWISE
from paceline.comm.shm.staging import (
    UNEVEN,
    CollectiveKind,
    Fingerprint,
    ReduceRule,
    StagedRounds,
    Steps,
    checksum,
    reduce,
)
from paceline.core.errors import CollectiveError, InputError

AT_ONCE_BYTES = 512 * 1024
"""Bytes that all ranks together may show for each of them to reduce all of it; above, a second round is faster.

On 2 idle cores of an Intel Xeon, at once against in slices: 2 ranks 53 to 71 µs for 256 KiB, 102 to 108 for 512;
4 ranks 199 to 233 for 128 KiB, 403 to 329 for 256 (medians of 10 alternating turns of 150 calls).
"""

BROADCAST_BYTES = 2**20
"""Bytes of a round in which one rank alone shows something: all N stages would hold more, but not the caches."""


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
    if all(map(plain, tensors)):
        return steps
    return _write_back(steps, zip(tensors, vectors, strict=True))


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


def _barrier(rounds: StagedRounds, fingerprint: Fingerprint | None) -> Steps:
    """Post this round and wait for all ranks; in the first round of a collective compare the fingerprints."""
    if fingerprint is not None:
        rounds.show(fingerprint)
    rounds.post()
    if not rounds.all_posted():
        yield rounds.all_posted
    if fingerprint is not None:
        rounds.check(fingerprint)


def _chunks(x: Tensor, size: int) -> list[Tensor]:
    """Cut a vector; an empty one is one chunk, since all ranks must post a round."""
    return [x[start : start + size] for start in range(0, max(x.numel(), 1), size)]


def barrier(rounds: StagedRounds) -> Steps:
    """Wait for all ranks."""
    yield from _barrier(rounds, Fingerprint(CollectiveKind.barrier))


def broadcast(rounds: StagedRounds, x: Tensor, root: int) -> Steps:
    """Replace ``x`` by the root's ``x``, on all ranks."""
    fingerprint: Fingerprint | None = Fingerprint(CollectiveKind.broadcast, x.dtype, x.numel(), root)
    per_round = min(rounds.joint(x.dtype).numel(), BROADCAST_BYTES // x.element_size())
    for chunk in _chunks(x, per_round):
        stage = rounds.joint(x.dtype)[: chunk.numel()]
        if rounds.rank == root:
            stage.copy_(chunk)
        yield from _barrier(rounds, fingerprint)
        fingerprint = None
        if rounds.rank != root:
            chunk.copy_(stage)


def all_reduce(rounds: StagedRounds, x: Tensor, out: Tensor, rule: ReduceRule) -> Steps:
    """Write the reduction of all ranks' ``x`` to ``out``; ``x`` stays as it is unless both are one."""
    fingerprint = Fingerprint(CollectiveKind.all_reduce, x.dtype, x.numel(), rule=rule)
    if rounds.size > 1 and _is_small(rounds, x):
        return _reduce_at_once(rounds, fingerprint, x, rule, out)
    if out is not x:
        out.copy_(x)
    return iter(()) if rounds.size == 1 else _reduce_in_slices(rounds, fingerprint, out, rule, keeps=True)


def reduce_to(rounds: StagedRounds, x: Tensor, root: int, rule: ReduceRule) -> Steps:
    """Replace the root's ``x`` by the reduction of all ranks' ``x``; on other ranks it stays as it is."""
    if rounds.size == 1:  # its own reduction, of any number of bytes
        return iter(())
    fingerprint = Fingerprint(CollectiveKind.reduce, x.dtype, x.numel(), root, rule)
    keeps = rounds.rank == root
    if _is_small(rounds, x):
        return _reduce_at_once(rounds, fingerprint, x, rule, x if keeps else None)
    return _reduce_in_slices(rounds, fingerprint, x, rule, keeps=keeps)


def _is_small(rounds: StagedRounds, x: Tensor) -> bool:
    return x.numel() * x.element_size() <= min(AT_ONCE_BYTES // rounds.size, rounds.stage_bytes)


def _reduce_at_once(
    rounds: StagedRounds, fingerprint: Fingerprint, x: Tensor, rule: ReduceRule, out: Tensor | None
) -> Steps:
    shown = rounds.fronts(x.dtype, x.numel())
    shown[rounds.rank].copy_(x)
    yield from _barrier(rounds, fingerprint)
    if out is not None:
        reduce(shown, rule, out)


def _reduce_in_slices(
    rounds: StagedRounds, fingerprint: Fingerprint | None, x: Tensor, rule: ReduceRule, *, keeps: bool
) -> Steps:
    rank, size = rounds.rank, rounds.size
    slot = rounds.stages(x.dtype)[0].numel() // size
    before: list[Tensor] = []  # slices of the chunk whose results are shown in this round
    for chunk in [*_chunks(x, slot * size), None]:
        stages = rounds.stages(x.dtype)
        # As equal as can be; the last ones are shorter or empty.
        each = 0 if chunk is None else -(-chunk.numel() // size)
        slices = [] if chunk is None else [chunk[i * each : (i + 1) * each] for i in range(size)]
        for other, part in enumerate(slices):
            if other != rank:
                _slot(stages[rank], slot, other, part).copy_(part)
        yield from _barrier(rounds, fingerprint)
        fingerprint = None
        if keeps:
            for other, part in enumerate(before):
                if other != rank:
                    part.copy_(_slot(stages[other], slot, other, part))
        if slices:
            own = slices[rank]
            parts = [_slot(stage, slot, rank, own) for stage in stages]
            parts[rank] = own
            # The stages of the next round: the others read the result there after its barrier.
            result = _slot(rounds.stages(x.dtype)[rank], slot, rank, own)
            reduce(parts, rule, result)
            if keeps:
                own.copy_(result)
        before = slices


def _slot(stage: Tensor, slot: int, rank: int, part: Tensor) -> Tensor:
    """Return the place of a rank's part on a stage that is cut into slots."""
    return stage[rank * slot : rank * slot + part.numel()]


def reduce_scatter(rounds: StagedRounds, out: Tensor, parts: Sequence[Tensor], rule: ReduceRule) -> Steps:
    """Write the reduction of all ranks' part for this rank to ``out``."""
    rank, sizes = rounds.rank, [part.numel() for part in parts]
    fingerprint: Fingerprint | None = Fingerprint(
        CollectiveKind.reduce_scatter, out.dtype, UNEVEN, rule=rule, sizes_sum=checksum(sizes)
    )
    slot = rounds.stages(out.dtype)[0].numel() // rounds.size
    for start in range(0, max(*sizes, 1), slot):
        stages = rounds.stages(out.dtype)
        for other, part in enumerate(parts):
            if other != rank:
                chunk = part[start : start + slot]
                _slot(stages[rank], slot, other, chunk).copy_(chunk)
        yield from _barrier(rounds, fingerprint)
        fingerprint = None
        own = parts[rank][start : start + slot]
        shown = [_slot(stage, slot, rank, own) for stage in stages]
        place, shown[rank] = shown[rank], own
        reduce(shown, rule, place)  # not into out, which may be the own part itself
        out[start : start + slot].copy_(place)


def all_gather(rounds: StagedRounds, outs: Sequence[Tensor], x: Tensor) -> Steps:
    """Write each rank's ``x`` to ``outs[rank]``."""
    if any(out.numel() != x.numel() for out in outs):
        return exchange(rounds, CollectiveKind.all_gather, outs, [x] * rounds.size)
    return _gather(rounds, Fingerprint(CollectiveKind.all_gather, x.dtype, x.numel()), outs, x)


def gather(rounds: StagedRounds, outs: Sequence[Tensor], x: Tensor, root: int) -> Steps:
    """Write each rank's ``x`` to the root's ``outs[rank]``; other ranks give no ``outs``."""
    return _gather(rounds, Fingerprint(CollectiveKind.gather, x.dtype, x.numel(), root), outs, x)


def _gather(rounds: StagedRounds, fingerprint: Fingerprint | None, outs: Sequence[Tensor], x: Tensor) -> Steps:
    per_round = rounds.stages(x.dtype)[0].numel()
    for start in range(0, max(x.numel(), 1), per_round):
        stages, chunk = rounds.stages(x.dtype), x[start : start + per_round]
        stages[rounds.rank][: chunk.numel()].copy_(chunk)
        yield from _barrier(rounds, fingerprint)
        fingerprint = None
        for stage, out in zip(stages, outs, strict=False):
            out[start : start + per_round].copy_(stage[: chunk.numel()])


def scatter(rounds: StagedRounds, out: Tensor, parts: Sequence[Tensor], root: int) -> Steps:
    """Write the root's part for this rank to ``out``; other ranks give no ``parts``."""
    fingerprint: Fingerprint | None = Fingerprint(CollectiveKind.scatter, out.dtype, out.numel(), root)
    per_round = rounds.stages(out.dtype)[0].numel()
    for start in range(0, max(out.numel(), 1), per_round):
        stages, chunk = rounds.stages(out.dtype), out[start : start + per_round]
        for stage, part in zip(stages, parts, strict=False):
            stage[: chunk.numel()].copy_(part[start : start + per_round])
        yield from _barrier(rounds, fingerprint)
        fingerprint = None
        chunk.copy_(stages[rounds.rank][: chunk.numel()])


def exchange(rounds: StagedRounds, kind: CollectiveKind, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
    """Write each rank's part for this one to ``outs[rank]``; sizes may differ from pair to pair.

    Raises:
        CollectiveError: a rank expects another size than it is given; on all ranks alike.
    """
    dtype, all_sizes, words = parts[0].dtype, rounds.sizes(), 2 * rounds.size
    own_sizes = array("q", [*(part.numel() for part in parts), *(out.numel() for out in outs)])
    all_sizes[rounds.rank * words : (rounds.rank + 1) * words] = memoryview(own_sizes)
    fingerprint: Fingerprint | None = Fingerprint(kind, dtype, UNEVEN)
    slot = rounds.stages(dtype)[0].numel() // rounds.size
    start, longest = 0, 1
    while start < longest:
        stages = rounds.stages(dtype)
        for other, part in enumerate(parts):
            if other != rounds.rank:
                chunk = part[start : start + slot]
                _slot(stages[rounds.rank], slot, other, chunk).copy_(chunk)
        yield from _barrier(rounds, fingerprint)
        if fingerprint is not None:
            longest = _longest_part(rounds, all_sizes.tolist())
        fingerprint = None
        for other, (stage, out) in enumerate(zip(stages, outs, strict=True)):
            if other != rounds.rank:
                chunk = out[start : start + slot]
                chunk.copy_(_slot(stage, slot, rounds.rank, chunk))
        start += slot
    outs[rounds.rank].copy_(parts[rounds.rank])


def _longest_part(rounds: StagedRounds, sizes: list[int]) -> int:
    """Compare the sizes of all parts with those that are expected, and return the largest."""
    size = rounds.size
    if sizes.count(sizes[0]) == len(sizes):
        return sizes[0]
    for source, destination in product(range(size), repeat=2):
        given, expected = sizes[source * 2 * size + destination], sizes[destination * 2 * size + size + source]
        if given != expected:
            raise CollectiveError(
                f"in group {rounds.region.name} {rounds.region.named([source])} gives {given:,} elements to "
                f"{rounds.region.named([destination])}, which expects {expected:,}; make both the same"
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
        yield from exchange(rounds, CollectiveKind.all_gather, vectors, [part.contiguous().view(-1)] * rounds.size)
    # In the order of ranks, so that coalescing adds them in the same order on all of them.
    whole = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), x.shape, check_invariants=False)
    with torch.no_grad():
        x.copy_(whole.coalesce())
