"""Squared norms, to the digits that a difference of them needs."""

import pytest
import torch

from paceline.replica.noise_estimator import ROW, square


@pytest.mark.parametrize("elements", [0, 1, ROW - 1, ROW, ROW + 1, 300 * ROW + 7])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)])
def test_however_long_a_vector_is(elements: int, dtype: torch.dtype, bound: float) -> None:
    """Of a row √1024 roundings of float32 are left, 6e-8 each; rows are added in float64."""
    vector = torch.randn(elements, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(dtype)
    scale = torch.linspace(0.5, 2.0, elements, dtype=torch.float64).to(dtype)
    assert square([vector]) == pytest.approx(float(vector.double().square().sum()), rel=bound)
    divided = (vector / scale).double()
    assert square([vector, vector], [scale, scale]) == pytest.approx(2 * float(divided.square().sum()), rel=bound)


def test_a_tensor_of_any_shape() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert square([tensor.T]) == square([torch.tensor(0.0)]) + square([tensor]) == pytest.approx(55.0, rel=3e-7)


def test_what_is_too_large_is_infinite() -> None:
    assert square([torch.full((3,), 1e200, dtype=torch.float64)]) == float("inf")
