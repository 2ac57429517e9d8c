"""No shard waits for the others' terms of the loss before its backward pass."""

import functools

import torch
from torch import nn

from paceline import Program
from paceline.replica.base import Batch
from paceline.replica.tensor.functionalize import functionalize
from paceline.replica.tensor.prepare import capture_with_loss, gather_alone, prepare_shard
from paceline.replica.tensor.tp_group import TPCollectives
from tests.replica.tensor.shard_harness import Weighed
from tests.replica.tensor.threads import together


def columns() -> nn.Module:
    """Of which each shard has some, and the loss of these."""
    return nn.Linear(6, 8).double()


def test_the_loss_is_summed_after_backward() -> None:
    draw = torch.Generator().manual_seed(3)
    x, y = (torch.randn(5, size, generator=draw, dtype=torch.float64) for size in (6, 8))
    program = Program(columns, nn.functional.mse_loss, functools.partial(torch.optim.SGD, lr=0.1), (x, y), batch_size=5)
    whole = program.build()
    loss = nn.functional.mse_loss(whole(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = float(loss.detach())
    assert isinstance(whole.weight, nn.Parameter)
    norm = float(torch.linalg.vector_norm(whole.weight.grad))  # type: ignore[arg-type]

    batch = Batch(x, y, 5)
    captured = capture_with_loss(program, program.build(), batch)
    functionalize(captured.module)
    modules = [program.build() for _ in range(2)]  # here, for a check seeds torch's generator, which all threads share

    def work(shards: TPCollectives) -> tuple[float, float, float, list[int]]:
        counted = Weighed(shards)
        prepared = prepare_shard(
            program, modules[shards.rank], batch, counted, gather_alone, obtain=lambda *_: captured
        )
        calls = [counted.calls]
        (term,) = prepared.shard.module(x, y)
        term.backward()
        calls.append(counted.calls)
        total = float(prepared.loss(term).detach())
        calls.append(counted.calls)
        square = sum(float(p.grad.square().sum()) for p in prepared.shard.module.parameters() if p.dim() == 2)
        return float(term.detach()), total, square, [b - calls[0] for b in calls]

    found, _ = together(2, work)
    assert abs(sum(term for term, *_ in found) - expected) < 1e-12  # of a sum of 40 terms about 1
    for term, total, _, calls in found:
        assert abs(total - expected) < 1e-12
        assert term < 0.9 * total
        assert calls == [0, 0, 1]
    assert abs(sum(square for _, _, square, _ in found) ** 0.5 - norm) < 1e-12
