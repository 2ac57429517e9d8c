"""The sum of sparse tensors, as DDP asks for it where an embedding's gradient is sparse."""

import torch
from torch import Tensor

from paceline.comm.shm.calls import Kind, Rule
from paceline.comm.shm.collectives import all_gather, exchange
from paceline.comm.shm.rounds import Rounds, Steps
from paceline.core.errors import InputError


def check(rule: Rule) -> None:
    """Raise InputError where sparse tensors can't be combined so."""
    if rule is not Rule.sum:
        raise InputError(f"backend shm adds sparse tensors, and has no {rule.name} of them; write x.to_dense()")


def all_reduce(rounds: Rounds, x: Tensor) -> Steps:
    """``x`` becomes the sum of all ranks' ``x``, coalesced: all gather what each has, and add it in the same order."""
    mine = x.coalesce()
    indices, values = mine.indices(), mine.values()
    counts = torch.empty(rounds.size, dtype=torch.int64)
    yield from all_gather(rounds, counts.view(-1, 1).unbind(), torch.tensor([values.shape[0]]))
    places = [indices.new_empty(len(indices), count) for count in counts.tolist()]
    parts = [values.new_empty(count, *values.shape[1:]) for count in counts.tolist()]
    for outs, given in ((places, indices), (parts, values)):
        vectors = [out.view(-1) for out in outs]
        yield from exchange(rounds, Kind.all_gather, vectors, [given.contiguous().view(-1)] * rounds.size)
    whole = torch.sparse_coo_tensor(torch.cat(places, 1), torch.cat(parts), x.shape, check_invariants=False)
    with torch.no_grad():
        x.copy_(whole.coalesce())
