"""What only the simulated accelerator in C++ does: two devices, memory that is counted, copies that are late."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.model_cases import assert_same, inputs, mlp
from tests.accelerator.operation_cases import numbers

FIRST, SECOND = "sim:0", "sim:1"
KIB = 1024


def two_devices() -> None:
    """Each has its tensors; operands on both are refused, copies from one to the other are none to the host."""
    x = numbers(SECOND)
    assert (x + 1.0).device == torch.device(SECOND)
    assert torch.zeros_like(x).device == torch.device(SECOND)
    with torch.accelerator.device_index(1):
        assert torch.ones(3, device="sim").device == torch.device(SECOND)
    assert torch.ones(3, device="sim").device == torch.device(FIRST)
    functions: tuple[Callable[[], Any], ...] = (
        lambda: numbers(FIRST) + x,
        lambda: x.add_(numbers(FIRST)),
        lambda: x + numbers(FIRST)[0, 0],
        lambda: torch.cat([x, numbers(FIRST)]),
        lambda: nn.Linear(4, 2).to(FIRST)(x),
        lambda: x @ numbers("cpu").t(),
    )
    for function in functions:
        with pytest.raises(RuntimeError, match="same device"):
            function()
    torch.sim.copies.reset()
    moved = x.to(FIRST)
    assert torch.sim.copies == type(torch.sim.copies)()
    assert_same([numbers("cpu")], [moved])
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(3, device="sim:2")


def halves(first: str, second: str) -> list[Tensor]:
    """Train a model whose halves may be on two devices."""
    torch.manual_seed(0)
    model = mlp().eval()
    before, after = model[:3].to(first), model[3:].to(second)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        after(before(inputs("vectors").to(first)).to(second)).square().mean().backward()
        optimizer.step()
    assert {p.device for p in after.parameters()} == {torch.device(second)}
    return [p.detach() for p in model.parameters()]


def stages_on_two_devices() -> None:
    assert_same(halves("cpu", "cpu"), halves(FIRST, SECOND))


def memory() -> None:
    """Counts for each device what is allocated, and its peak."""
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    x = torch.zeros(KIB, dtype=torch.uint8, device=FIRST)
    assert torch.accelerator.memory_allocated(0) - before == KIB
    y = x + 1
    del y
    assert torch.accelerator.memory_allocated(0) - before == KIB
    assert torch.accelerator.max_memory_allocated(0) - before == 2 * KIB
    torch.accelerator.reset_peak_memory_stats(0)
    x.add_(1)
    assert torch.accelerator.max_memory_allocated(0) - before == KIB
    there = torch.accelerator.memory_allocated(1)
    on_second = torch.zeros(3 * KIB, dtype=torch.uint8, device=SECOND)
    assert torch.accelerator.memory_allocated(1) - there == 3 * KIB
    del x, on_second
    assert torch.accelerator.memory_allocated(0) == before
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 has"):
        torch.empty(2**31, dtype=torch.uint8, device=FIRST)
    free, total = torch.accelerator.get_memory_info(0)
    assert total - free == before


def unwritten_memory() -> None:
    """Whoever reads it gets NaNs."""
    assert torch.empty(5, device=FIRST).isnan().all()


def on_the_way(x: Tensor) -> Tensor:
    """Begin a copy to the host."""
    target = torch.zeros(x.shape, pin_memory=True)
    target.copy_(x, non_blocking=True)
    assert target.isnan().all()
    return target


def late_copies() -> None:
    """A copy is there once somebody has waited: for the stream, an event behind it, the device; or has asked twice."""
    x, stream, event = numbers("sim"), torch.accelerator.current_stream(), torch.Event("sim")
    expected = numbers("cpu")

    def asks() -> None:
        event.record()
        assert not event.query()
        assert event.query()

    def by_event() -> None:
        event.record()
        event.synchronize()

    def by_another_stream() -> None:
        event.record()
        other = torch.Stream("sim")
        other.wait_event(event)
        other.synchronize()

    waits: tuple[Callable[[], Any], ...] = (
        stream.synchronize,
        torch.accelerator.synchronize,
        by_event,
        by_another_stream,
        asks,
        lambda: x.sum().item(),
        x.cpu,
    )
    for wait in waits:
        target = on_the_way(x)
        wait()
        assert torch.equal(target, expected), wait


def early_waits() -> None:
    """A wait for something else does not do."""
    x, event, other = numbers("sim"), torch.Event("sim"), torch.Stream("sim")
    event.record()
    target = on_the_way(x)
    event.synchronize()
    other.synchronize()
    torch.accelerator.synchronize(1)
    assert target.isnan().all()
    x.fill_(0.0)  # behind the copy on the same stream
    torch.accelerator.synchronize()
    assert torch.equal(target, numbers("cpu"))
    with other:
        target = on_the_way(numbers("sim"))
    torch.accelerator.current_stream().synchronize()
    assert target.isnan().all()
    other.synchronize()
    assert torch.equal(target, numbers("cpu"))


def late_uploads() -> None:
    """What is changed before the copy from it is made is copied as it is then, unless somebody has waited."""
    source = numbers("cpu").pin_memory()
    x = torch.zeros(3, 4, device="sim").copy_(source, non_blocking=True)
    source.fill_(0.0)
    assert_same([torch.zeros(3, 4)], [x])
    for wait in (torch.accelerator.synchronize, lambda: x.add_(0.0)):
        source.copy_(numbers("cpu"))
        x.copy_(source, non_blocking=True)
        wait()
        source.fill_(0.0)
        assert_same([numbers("cpu")], [x])
    back = torch.zeros(3, 4, pin_memory=True)
    x.copy_(source, non_blocking=True)
    back.copy_(x, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(back, source)


def copies_that_are_not_late() -> None:
    """Those that block, and those to memory that is not pinned."""
    x = numbers("sim")
    assert torch.equal(torch.zeros(3, 4).copy_(x, non_blocking=True), numbers("cpu"))
    assert torch.equal(torch.zeros(3, 4, pin_memory=True).copy_(x), numbers("cpu"))
    assert torch.zeros(0, pin_memory=True).is_pinned()
    assert not torch.zeros(3).is_pinned()


def own_generators() -> None:
    """Of a device, and ones that are made; what they draw is what the CPU's do."""
    for device in (FIRST, SECOND):
        generator = torch.Generator(device=device).manual_seed(7)
        found = torch.rand(5, device=device, generator=generator)
        assert_same([torch.rand(5, generator=torch.Generator().manual_seed(7))], [found])
        assert not torch.equal(torch.rand(5, device=device, generator=generator), found)
    torch.manual_seed(3)
    first = torch.rand(5, device=FIRST)
    assert_same([first.cpu()], [torch.rand(5, device=SECOND)])
    states = torch.sim.get_rng_state_all()
    again = torch.rand(5, device=SECOND)
    torch.sim.set_rng_state_all(states)
    assert torch.equal(torch.rand(5, device=SECOND), again)


CASES = [
    *(two_devices, stages_on_two_devices, memory, unwritten_memory, late_copies, early_waits, late_uploads),
    *(copies_that_are_not_late, own_generators),
]
