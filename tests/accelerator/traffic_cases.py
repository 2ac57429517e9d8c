"""What crosses between the host and the device ``sim``: each copy counts, and operands on both are refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.replica.gradient_clipping import clip
from tests.accelerator.model_cases import assert_same, inputs, mlp
from tests.accelerator.operation_cases import CPU, SIM, numbers


def counted() -> None:
    """Each way between host and device counts, and no other."""
    x, counts = numbers(SIM), torch.sim.copies

    def moved(function: Callable[[], Any]) -> tuple[int, int]:
        counts.reset()
        function()
        return counts.to_host_bytes, counts.to_device_bytes

    for number, (function, expected) in enumerate(
        (
            (x.cpu, (48, 0)),
            (lambda: x[0].to("cpu", torch.float64), (32, 0)),
            (x[0, 0].item, (4, 0)),
            (lambda: float(x.double().sum()), (8, 0)),
            (lambda: bool(x[0, 0] > 0), (1, 0)),
            (x.tolist, (48, 0)),
            (lambda: x.cpu().numpy(), (48, 0)),
            (lambda: torch.empty(3, 4).copy_(x), (48, 0)),
            (lambda: torch.equal(x, x), (1, 0)),
            (lambda: x.copy_(torch.ones(3, 4)), (0, 48)),
            (lambda: torch._foreach_copy_([x, x[0]], [torch.ones(3, 4), torch.ones(4)]), (0, 64)),
            (lambda: torch._foreach_copy_([torch.ones(3, 4), torch.ones(4)], [x, x[0]]), (64, 0)),
            (lambda: torch._foreach_copy_([x], [x.clone()]), (0, 0)),
            (lambda: torch.ones(5).to(SIM), (0, 20)),
            (lambda: torch.tensor([1.0, 2.0], device=SIM), (0, 8)),
            (lambda: x[torch.tensor([0])], (0, 8)),
            (lambda: nn.Linear(3, 2).to(SIM), (0, 32)),
            (lambda: copy.deepcopy(x), (0, 0)),
            (lambda: torch.zeros(3, 4, device=SIM).copy_(x.mul_(2)), (0, 0)),
        )
    ):
        found = moved(function)
        assert found == expected, (number, found, expected)
    with pytest.raises(TypeError, match="convert sim"):
        x.numpy()


def a_step_copies_nothing() -> None:
    """Forward, backward, clipping and every kind of optimizer leave all on the device."""
    x, target = inputs("vectors").to(SIM), torch.zeros(4, dtype=torch.int64, device=SIM)
    model = mlp().to(SIM)
    for optimizer in (
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        torch.optim.Adam(model.parameters(), foreach=True),
        torch.optim.AdamW(model.parameters(), fused=True),
    ):
        for _ in range(2):
            torch.sim.copies.reset()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert torch.sim.copies == type(torch.sim.copies)(), torch.sim.copies


def clipping_copies_nothing() -> None:
    """Norms and the scale stay on the device, and have the host's bits; of half precision the norm is copied."""
    for bound in (0.5, 100.0):
        for dtypes, copied in (
            ((torch.float64,), 0),
            ((torch.float32,), 0),
            ((torch.float32, torch.float64), 0),
            ((torch.bfloat16,), 2),
        ):
            on_cpu = [inputs("vectors").to(dtype) for dtype in dtypes]
            on_device = [vector.to(SIM) for vector in on_cpu]
            torch.sim.copies.reset()
            clip(on_device, bound)
            assert torch.sim.copies.to_host_bytes == copied, (dtypes, torch.sim.copies)
            assert torch.sim.copies.to_device_bytes == 0, (dtypes, torch.sim.copies)
            clip(on_cpu, bound)
            assert_same(on_cpu, on_device)


def refusals() -> None:
    """Operands on two devices, as by CUDA."""
    x, host = numbers(SIM), numbers(CPU)
    functional = nn.functional
    for function in (
        lambda: x + host,
        lambda: host + x,
        lambda: x @ host.t(),
        lambda: host.add_(x),
        lambda: host[0, 0].add_(x[0, 0]),
        lambda: x.addcmul_(x, host),
        lambda: torch.add(x, x, out=host),
        lambda: torch.cat([x, host]),
        lambda: torch.stack([x[0, 0], host[0, 0]]),
        lambda: torch.where(x > 0, x, host),
        lambda: torch._foreach_add([x], [host]),
        lambda: functional.linear(x, host),
        lambda: functional.cross_entropy(x, torch.tensor([0, 1, 2])),
        lambda: functional.embedding(torch.tensor([0]), x),
        lambda: functional.conv1d(x[None], host[None, :, :2]),
        lambda: functional.layer_norm(x, (4,), host[0]),
        lambda: functional.scaled_dot_product_attention(x, x, host),
        lambda: nn.LSTM(4, 2).to(SIM)(host),
        lambda: nn.Linear(4, 2)(x),
    ):
        assert _refused(function), f"line {function.__code__.co_firstlineno}"


def _refused(function: Callable[[], Any]) -> bool:
    try:
        function()
    except RuntimeError as error:
        return "same device" in str(error)
    return False


CASES = [counted, a_step_copies_nothing, clipping_copies_nothing, refusals]
