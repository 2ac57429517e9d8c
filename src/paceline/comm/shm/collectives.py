"""The collectives, in rounds. Tensors are contiguous vectors; each function yields what it waits for.

The collectives, in rounds. Tensors are contiguous vectors; each function yields what it waits for.

Those with a rule reduce in two phases, chunk after chunk, so that each rank combines one slice of N::

    round    0              1                         2                 ...
    shown    slices of      slices of chunk 1,        slices of chunk 2,
             chunk 0        results of chunk 0        results of chunk 1
    read     my slice 0     my slice 1, results 0     my slice 2, results 1

A rank's own slice needs no showing: its place on the stage takes the result. Where little is to be reduced all ranks
combine all of it themselves, which saves a round.
"""

from array import array
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from paceline.comm.shm.staging import UNEVEN, CollectiveKind, Fingerprint, ReduceRule, StagedRounds, Steps, checksum
from paceline.comm.shm.tensor_ops import reduce
from paceline.core.errors import CollectiveError, InputError


def check_sparse(rule: ReduceRule) -> None:
    """Raise InputError where sparse tensors can't be combined so."""
    if rule is not ReduceRule.sum:
        raise InputError(f"backend shm adds sparse tensors, and has no {rule.name} of them; write x.to_dense()")


def sparse_all_reduce(rounds: StagedRounds, x: Tensor) -> Steps:
    """``x`` becomes the sum of all ranks' ``x``, coalesced: all gather what each has, and add it in the same order."""
    mine = x.coalesce()
    indices, values = mine.indices(), mine.values()
    counts = torch.empty(rounds.size, dtype=torch.int64)
    yield from all_gather(rounds, counts.view(-1, 1).unbind(), torch.tensor([values.shape[0]]))
    places = [indices.new_empty(len(indices), count) for count in counts.tolist()]
    parts = [values.new_empty(count, *values.shape[1:]) for count in counts.tolist()]
    for outs, given in ((places, indices), (parts, values)):
        vectors = [out.view(-1) for out in outs]
        yield from exchange(rounds, CollectiveKind.all_gather, vectors, [given.contiguous().view(-1)] * rounds.size)
    whole = torch.sparse_coo_tensor(torch.cat(places, 1), torch.cat(parts), x.shape, check_invariants=False)
    with torch.no_grad():
        x.copy_(whole.coalesce())


AT_ONCE_BYTES = 512 * 1024
"""What all ranks together may show for each of them to combine all of it: above, a second round is quicker.

On 2 quiet cores of an Intel Xeon, at once against in slices: 2 ranks 53 to 71 µs for 256 KiB, 102 to 108 for 512;
4 ranks 199 to 233 for 128 KiB, 403 to 329 for 256 (medians of 10 alternating turns of 150 calls).
"""

BROADCAST_BYTES = 2**20
"""Of a round in which one rank alone shows something: it could use all N stages, but so it stays in the caches."""


def barrier(rounds: StagedRounds) -> Steps:
    """Wait for all."""
    yield from _meet(rounds, Fingerprint(CollectiveKind.barrier))


def broadcast(rounds: StagedRounds, x: Tensor, root: int) -> Steps:
    """``x`` of the root, on all."""
    call: Fingerprint | None = Fingerprint(CollectiveKind.broadcast, x.dtype, x.numel(), root)
    per_round = min(rounds.whole(x.dtype).numel(), BROADCAST_BYTES // x.element_size())
    for chunk in _chunks(x, per_round):
        stage = rounds.whole(x.dtype)[: chunk.numel()]
        if rounds.rank == root:
            stage.copy_(chunk)
        yield from _meet(rounds, call)
        call = None
        if rounds.rank != root:
            chunk.copy_(stage)


def all_reduce(rounds: StagedRounds, x: Tensor, rule: ReduceRule) -> Steps:
    """``x`` becomes the combination of all ranks' ``x``."""
    call = Fingerprint(CollectiveKind.all_reduce, x.dtype, x.numel(), rule=rule)
    return _reduced(rounds, call, x, rule, takes=True)


def combine(rounds: StagedRounds, x: Tensor, out: Tensor, rule: ReduceRule) -> Steps:
    """``out`` becomes the combination of all ranks' ``x``, which stays as it is unless both are one."""
    call = Fingerprint(CollectiveKind.all_reduce, x.dtype, x.numel(), rule=rule)
    if rounds.size > 1 and _small(rounds, x):
        return _reduced_at_once(rounds, call, x, rule, out)
    if out is not x:
        out.copy_(x)
    return _reduced(rounds, call, out, rule, takes=True)


def reduce_to(rounds: StagedRounds, x: Tensor, root: int, rule: ReduceRule) -> Steps:
    """``x`` of the root becomes the combination of all ranks' ``x``; elsewhere it stays."""
    call = Fingerprint(CollectiveKind.reduce, x.dtype, x.numel(), root, rule)
    return _reduced(rounds, call, x, rule, takes=rounds.rank == root)


def _reduced(rounds: StagedRounds, call: Fingerprint, x: Tensor, rule: ReduceRule, *, takes: bool) -> Steps:
    if rounds.size == 1:  # its own combination, of however many bytes
        return iter(())
    if _small(rounds, x):
        return _reduced_at_once(rounds, call, x, rule, x if takes else None)
    return _reduced_in_slices(rounds, call, x, rule, takes=takes)


def _small(rounds: StagedRounds, x: Tensor) -> bool:
    return x.numel() * x.element_size() <= min(AT_ONCE_BYTES // rounds.size, rounds.stage_bytes)


def _reduced_at_once(rounds: StagedRounds, call: Fingerprint, x: Tensor, rule: ReduceRule, out: Tensor | None) -> Steps:
    shown = rounds.fronts(x.dtype, x.numel())
    shown[rounds.rank].copy_(x)
    yield from _meet(rounds, call)
    if out is not None:
        reduce(shown, rule, out)


def _reduced_in_slices(
    rounds: StagedRounds, call: Fingerprint | None, x: Tensor, rule: ReduceRule, *, takes: bool
) -> Steps:
    rank, size = rounds.rank, rounds.size
    slot = rounds.stages(x.dtype)[0].numel() // size
    before: list[Tensor] = []  # slices of the chunk whose results are being shown
    for chunk in [*_chunks(x, slot * size), None]:
        stages = rounds.stages(x.dtype)
        slices = _slices(chunk, size) if chunk is not None else []
        for other, part in enumerate(slices):
            if other != rank:
                _place(stages[rank], slot, other, part).copy_(part)
        yield from _meet(rounds, call)
        call = None
        if takes:
            for other, part in enumerate(before):
                if other != rank:
                    part.copy_(_place(stages[other], slot, other, part))
        if slices:
            own = slices[rank]
            parts = [_place(stage, slot, rank, own) for stage in stages]
            parts[rank] = own
            result = _place(rounds.stages(x.dtype)[rank], slot, rank, own)
            reduce(parts, rule, result)
            if takes:
                own.copy_(result)
        before = slices


def _slices(chunk: Tensor, size: int) -> list[Tensor]:
    """As equal as can be, the last ones shorter or empty."""
    each = -(-chunk.numel() // size)
    return [chunk[i * each : (i + 1) * each] for i in range(size)]


def _place(stage: Tensor, slot: int, of: int, part: Tensor) -> Tensor:
    """Where a rank's part lies on a stage of so long slots."""
    return stage[of * slot : of * slot + part.numel()]


def reduce_scatter(rounds: StagedRounds, out: Tensor, parts: Sequence[Tensor], rule: ReduceRule) -> Steps:
    """``out`` becomes the combination of all ranks' part for this rank."""
    rank, sizes = rounds.rank, [part.numel() for part in parts]
    call: Fingerprint | None = Fingerprint(
        CollectiveKind.reduce_scatter, out.dtype, UNEVEN, rule=rule, sizes_sum=checksum(sizes)
    )
    slot = rounds.stages(out.dtype)[0].numel() // rounds.size
    for start in range(0, max(*sizes, 1), slot):
        stages = rounds.stages(out.dtype)
        for other, part in enumerate(parts):
            if other != rank:
                chunk = part[start : start + slot]
                _place(stages[rank], slot, other, chunk).copy_(chunk)
        yield from _meet(rounds, call)
        call = None
        own = parts[rank][start : start + slot]
        shown = [_place(stage, slot, rank, own) for stage in stages]
        place, shown[rank] = shown[rank], own
        reduce(shown, rule, place)  # not into out, which may be the own part itself
        out[start : start + slot].copy_(place)


def all_gather(rounds: StagedRounds, outs: Sequence[Tensor], x: Tensor) -> Steps:
    """``outs[rank]`` becomes that rank's ``x``."""
    if any(out.numel() != x.numel() for out in outs):
        return exchange(rounds, CollectiveKind.all_gather, outs, [x] * rounds.size)
    return _gathered(rounds, Fingerprint(CollectiveKind.all_gather, x.dtype, x.numel()), outs, x)


def gather(rounds: StagedRounds, outs: Sequence[Tensor], x: Tensor, root: int) -> Steps:
    """On the root ``outs[rank]`` becomes that rank's ``x``; other ranks give no ``outs``."""
    return _gathered(rounds, Fingerprint(CollectiveKind.gather, x.dtype, x.numel(), root), outs, x)


def _gathered(rounds: StagedRounds, first: Fingerprint | None, outs: Sequence[Tensor], x: Tensor) -> Steps:
    per_round = rounds.stages(x.dtype)[0].numel()
    for start in range(0, max(x.numel(), 1), per_round):
        stages, chunk = rounds.stages(x.dtype), x[start : start + per_round]
        stages[rounds.rank][: chunk.numel()].copy_(chunk)
        yield from _meet(rounds, first)
        first = None
        for stage, out in zip(stages, outs, strict=False):
            out[start : start + per_round].copy_(stage[: chunk.numel()])


def scatter(rounds: StagedRounds, out: Tensor, parts: Sequence[Tensor], root: int) -> Steps:
    """``out`` becomes the root's part for this rank; other ranks give no ``parts``."""
    call: Fingerprint | None = Fingerprint(CollectiveKind.scatter, out.dtype, out.numel(), root)
    per_round = rounds.stages(out.dtype)[0].numel()
    for start in range(0, max(out.numel(), 1), per_round):
        stages, chunk = rounds.stages(out.dtype), out[start : start + per_round]
        for stage, part in zip(stages, parts, strict=False):
            stage[: chunk.numel()].copy_(part[start : start + per_round])
        yield from _meet(rounds, call)
        call = None
        chunk.copy_(stages[rounds.rank][: chunk.numel()])


def exchange(rounds: StagedRounds, kind: CollectiveKind, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
    """``outs[other]`` becomes that rank's part for this one; sizes may differ from pair to pair.

    Raises:
        CollectiveError: a rank expects another size than it is given; on all ranks alike.
    """
    dtype, notes, words = parts[0].dtype, rounds.notes(), 2 * rounds.size
    said = array("q", [*(part.numel() for part in parts), *(out.numel() for out in outs)])
    notes[rounds.rank * words : (rounds.rank + 1) * words] = memoryview(said)
    call: Fingerprint | None = Fingerprint(kind, dtype, UNEVEN)
    slot = rounds.stages(dtype)[0].numel() // rounds.size
    start, most = 0, 1
    while start < most:
        stages = rounds.stages(dtype)
        for other, part in enumerate(parts):
            if other != rounds.rank:
                chunk = part[start : start + slot]
                _place(stages[rounds.rank], slot, other, chunk).copy_(chunk)
        yield from _meet(rounds, call)
        if call is not None:
            most = _most(rounds, notes)
        call = None
        for other, (stage, out) in enumerate(zip(stages, outs, strict=True)):
            if other != rounds.rank:
                chunk = out[start : start + slot]
                chunk.copy_(_place(stage, slot, rounds.rank, chunk))
        start += slot
    outs[rounds.rank].copy_(parts[rounds.rank])


def _most(rounds: StagedRounds, notes: "memoryview[int]") -> int:
    """The largest part, all having been compared."""
    said, size = notes.tolist(), rounds.size
    if said.count(said[0]) == len(said):
        return said[0]
    for source, destination in product(range(size), repeat=2):
        given, expected = said[source * 2 * size + destination], said[destination * 2 * size + size + source]
        if given != expected:
            raise CollectiveError(
                f"in group {rounds.room.name} {rounds.room.named([source])} gives {given:,} elements to "
                f"{rounds.room.named([destination])}, which expects {expected:,}; make both the same"
            )
    return max(said)


def _meet(rounds: StagedRounds, call: Fingerprint | None) -> Steps:
    """Post what has been written and wait for all; in a call's first round compare what is called."""
    if call is not None:
        rounds.say(call)
    rounds.post()
    if not rounds.all_in():
        yield rounds.all_in
    if call is not None:
        rounds.agree(call)


def _chunks(x: Tensor, size: int) -> list[Tensor]:
    """One at least."""
    return [x[start : start + size] for start in range(0, max(x.numel(), 1), size)]
