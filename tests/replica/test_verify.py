"""What passes for the same model: rounding does, wherever it comes from, and ten times as much does not."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.replica.capture.verify import ModelError, check, model_runs
from paceline.replica.module_utils import tensors_of

ULPS = 32
"""Of :func:`check`, unless it is told another number."""


class Normalised(nn.Module):
    """In float64, but for its norm, as several models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        low = (x @ self.weight).float()
        return (low / low.pow(2).sum(-1, keepdim=True)).double()

    def in_parts(self, x: Tensor) -> Tensor:
        """The same squares, summed in another order, as two shards do."""
        low = (x @ self.weight).float()
        parts = [part.sum(-1, keepdim=True) for part in low.pow(2).split(5, -1)]
        return (low / functools.reduce(torch.add, parts)).double()


class Centred(nn.Module):
    """A batch norm of values whose mean is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(torch.cat([x, -x]))
        return y

    def in_another_order(self, x: Tensor) -> Tensor:
        """The same rows, reversed."""
        y: Tensor = self.norm(torch.cat([x, -x]).flip(0))
        return y.flip(0)


def inputs(features: int) -> Tensor:
    return torch.randn(6, features, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / 3


def checked(module: nn.Module, run: Callable[[Tensor], Tensor], features: int) -> None:
    check(module, run, functools.partial(tensors_of, module), inputs(features))


def test_a_float64_model_that_computes_a_norm_in_float32() -> None:
    module = Normalised()
    exact, other = module(inputs(64)[:3]), module.in_parts(inputs(64)[:3])
    assert (exact - other).abs().max() > ULPS * torch.finfo(torch.float64).eps * exact.abs().max()
    checked(module, module.in_parts, 64)


def test_ten_times_the_rounding_of_its_lowest_precision_is_refused() -> None:
    module = Normalised()
    wrong = 10 * ULPS * torch.finfo(torch.float32).eps
    with pytest.raises(InputError, match="output 0 differs"):
        checked(module, lambda x: module(x) * (1 + wrong), 64)


def test_a_model_that_computes_all_in_float64_is_held_to_that() -> None:
    module = nn.Linear(4, 4).double()
    checked(module, lambda x: module(x) * (1 + ULPS / 4 * torch.finfo(torch.float64).eps), 4)
    with pytest.raises(InputError, match="output 0 differs"):
        checked(module, lambda x: module(x) * (1 + 10 * ULPS * torch.finfo(torch.float64).eps), 4)


def test_a_running_mean_that_is_zero_but_for_rounding() -> None:
    module = Centred()
    checked(module, module.in_another_order, 4)


def test_one_that_is_off_by_ten_times_the_rounding_of_the_variance_is_refused() -> None:
    module = Centred()

    def off(x: Tensor) -> Tensor:
        y: Tensor = module(x)
        assert module.norm.running_mean is not None
        module.norm.running_mean.data += 10 * ULPS * torch.finfo(torch.float64).eps
        return y

    with pytest.raises(InputError, match=r"buffer 'norm\.running_mean' differs"):
        checked(module, off, 4)


def test_a_buffer_that_the_model_leaves_has_no_scale_but_its_own() -> None:
    class Kept(Centred):
        def __init__(self) -> None:
            super().__init__()
            self.norm.register_buffer("table", torch.full((3,), 1e-9, dtype=torch.float64))

    module = Kept()

    def off(x: Tensor) -> Tensor:
        module.norm.table *= 1 + 1e-9
        y: Tensor = module(x)
        return y

    with pytest.raises(InputError, match=r"buffer 'norm\.table' differs"):
        checked(module, off, 4)


class AtLeast(nn.Module):
    """Takes so many rows or more; writes how many there were into a buffer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear, self.rows = nn.Linear(4, 4).double(), rows
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) >= self.rows, f"{len(x)} rows"
        self.seen += len(x)  # type: ignore[operator]
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_what_the_model_does_may_be_computed_before_there_is_a_version(rows: int) -> None:
    module, x = AtLeast(rows), inputs(4)
    named, runs = functools.partial(tensors_of, module), model_runs(module, x, (2, 3))
    assert module.seen == 0.0, "it is left as it was"
    assert [len(run.inputs) for run in runs] == {1: [2, 3], 3: [3], 6: [6]}[rows]
    check(module, module, named, x, runs=runs)
    with torch.no_grad():
        module.linear.weight[0, 0] += 1.0  # the version is another one than what has been run
    with pytest.raises(InputError, match="output 0 differs"):
        check(module, module, named, x, runs=runs)


def test_a_model_that_takes_no_batch_is_named_before_any_version() -> None:
    with pytest.raises(ModelError, match=r"AtLeast itself fails in training.*6 rows"):
        model_runs(AtLeast(7), inputs(4), (2, 3))


class Narrowed(nn.Module):
    """Returns none of its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight)[:, :0]


def test_a_model_whose_only_output_is_empty() -> None:
    (run,) = model_runs(Narrowed(), (torch.ones(2, 3),), (), of_inputs=False)
    assert run.scale == 0


class Turned(nn.Module):
    """Complex numbers in, one out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def test_complex_inputs_and_outputs_have_gradients() -> None:
    module, x = Turned(), torch.complex(inputs(4), inputs(4).flip(0))
    named = functools.partial(tensors_of, module)
    check(module, module, named, x)
    with pytest.raises(InputError, match="the gradient of input"):
        check(module, lambda x: (x.detach() * module.weight).sum(), named, x)


def test_complex_numbers_of_lower_precision_are_held_to_that() -> None:
    class Low(Turned):
        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).to(torch.complex64).to(torch.complex128)

    module, x = Low(), torch.complex(inputs(4), inputs(4).flip(0))
    named = functools.partial(tensors_of, module)
    check(module, lambda x: module(x) * (1 + ULPS / 4 * torch.finfo(torch.float32).eps), named, x)
