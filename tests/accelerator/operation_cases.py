"""What else the device ``sim`` must do as a real one does: operations, flat vectors, transforms, copies of modules."""

import copy
import io
import os
import warnings
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests.accelerator.model_cases import IMAGES, SEQUENCES, TOKENS, assert_same, cnn, encoder, inputs, mlp

CPU, SIM = "cpu", "sim"

Made = Callable[[str], Tensor]


def made(functions: Mapping[str, Made]) -> None:
    """Raise AssertionError unless each function makes the same on both devices, from the same seed."""
    for name, function in functions.items():
        results = []
        for device in (CPU, SIM):
            torch.manual_seed(5)
            results.append([function(device)])
        try:
            assert_same(*results)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def numbers(device: str) -> Tensor:
    return (torch.arange(12.0, device=device) - 5.0).view(3, 4)


def factories() -> None:
    made(
        {
            "zeros": lambda device: torch.zeros(2, 3, device=device),
            "ones": lambda device: torch.ones(2, dtype=torch.float64, device=device),
            "full": lambda device: torch.full((2,), 3.5, device=device),
            "arange": lambda device: torch.arange(5, device=device),
            "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
            "eye": lambda device: torch.eye(3, device=device),
            "tensor": lambda device: torch.tensor([1, 2], device=device),
            "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
            "empty_like": lambda device: torch.empty_like(numbers(device).t()).fill_(1.0),
            "new_zeros": lambda device: numbers(device).new_zeros(3),
            "bfloat16": lambda device: torch.ones(3, device=device).to(torch.bfloat16),
            "none": lambda device: torch.zeros(0, 3, device=device),
        }
    )


def random_numbers() -> None:
    made(
        {
            "rand": lambda device: torch.rand(9, device=device),
            "randn": lambda device: torch.randn(33, device=device),
            "randint": lambda device: torch.randint(5, (4,), device=device),
            "randperm": lambda device: torch.randperm(9, device=device),
            "rand_like": lambda device: torch.rand_like(numbers(device)),
            "multinomial": lambda device: torch.multinomial(torch.ones(5, device=device), 2),
            "bernoulli": lambda device: torch.bernoulli(torch.full((9,), 0.5, device=device)),
            "dropout": lambda device: nn.functional.dropout(torch.ones(99, device=device), 0.3),
            "rrelu": lambda device: nn.functional.rrelu(numbers(device), training=True),
            "init": lambda device: nn.init.trunc_normal_(torch.empty(4, 4, device=device)),
        }
    )


def generators() -> None:
    """The device's is its own, may be saved and restored, and ``fork_rng`` restores it."""
    torch.manual_seed(0)
    state, host_state = torch.sim.get_rng_state(), torch.get_rng_state()
    first = torch.rand(3, device=SIM)
    assert torch.equal(torch.get_rng_state(), host_state)
    torch.rand(3)
    assert not torch.equal(torch.rand(3, device=SIM), first)
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=SIM), first)
    torch.sim.set_rng_state(state)
    with torch.random.fork_rng(devices=[0], device_type=SIM):
        torch.rand(3, device=SIM)
    assert torch.equal(torch.rand(3, device=SIM), first)
    with pytest.raises(RuntimeError, match="'sim' device type for generator"):
        torch.rand(3, device=SIM, generator=torch.Generator())


def out_arguments() -> None:
    made(
        {
            "of no elements": lambda device: torch.mm(
                numbers(device), numbers(device).t(), out=torch.empty(0, device=device)
            ),
            "of the right shape": lambda device: torch.add(numbers(device), 1.0, out=torch.zeros(3, 4, device=device)),
            "the operand itself": lambda device: torch.mul((x := numbers(device)), x, out=x),
            "a view": lambda device: torch.exp(numbers(device)[0], out=torch.zeros(8, device=device)[2:6]),
        }
    )
    first, second = torch.empty(0, device=SIM), torch.empty(0, dtype=torch.int64, device=SIM)
    results = torch.sort(numbers(SIM), 1, descending=True, out=(first, second))
    assert results[0].data_ptr() == first.data_ptr()
    assert_same(torch.sort(numbers(CPU), 1, descending=True), [first, second])


def changed(device: str) -> Tensor:
    """Change a tensor in place, itself and through its views."""
    x = numbers(device)
    x.add_(1.0).mul_(x).clamp_(max=30.0)
    x[0] = 7.0
    x[:, 1] += 1.0
    x[1:, 2:].fill_(2.0)
    x[x > 20.0] = 0.0
    x[torch.tensor([2], device=device), torch.tensor([0], device=device)] = -1.0
    x.t()[3].copy_(torch.ones(3, device=device))
    x.view(-1)[5:7].neg_()
    x %= 5
    x **= 2
    return x


def in_place() -> None:
    made({"changed": changed, "resized": lambda device: numbers(device).resize_(2, 3)})
    x = numbers(SIM)
    assert x.add_(1.0) is x


def others() -> None:
    made(
        {
            "where": lambda device: torch.where(numbers(device) > 0, numbers(device), 0.0),
            "cat": lambda device: torch.cat([numbers(device), numbers(device)], 1),
            "stack": lambda device: torch.stack([numbers(device), numbers(device)]),
            "topk": lambda device: torch.topk(numbers(device), 2).indices,
            "cumsum": lambda device: numbers(device).cumsum(0),
            "unique": lambda device: torch.unique(numbers(device).abs()),
            "nonzero": lambda device: numbers(device).nonzero(),
            "einsum": lambda device: torch.einsum("ij,kj->ik", numbers(device), numbers(device)),
            "complex": lambda device: torch.view_as_real(torch.fft.rfft(numbers(device))),
            "bits": lambda device: numbers(device).view(torch.int32),
            "unfold": lambda device: numbers(device).unfold(1, 2, 1).contiguous(),
            "scalar": lambda device: numbers(device) + torch.tensor(2.0),
            "host indices": lambda device: numbers(device)[torch.tensor([0, 2])],
            "svd": lambda device: torch.linalg.svdvals(numbers(device)),
            "clip": lambda device: clipped(numbers(device)),
            "vector": lambda device: nn.utils.parameters_to_vector([numbers(device), numbers(device)[0]]),
        }
    )


def clipped(x: Tensor) -> Tensor:
    parameter = nn.Parameter(torch.zeros_like(x))
    parameter.grad = x
    return nn.utils.clip_grad_norm_([parameter], 1.0)


def foreach_operations() -> None:
    for function in (
        lambda xs: torch._foreach_add(xs, xs, alpha=2.0),
        lambda xs: torch._foreach_mul(xs, 2.0),
        lambda xs: torch._foreach_mul(xs, xs[0].sum()),
        torch._foreach_norm,
        lambda xs: torch._foreach_lerp(xs, torch._foreach_neg(xs), 0.3),
        lambda xs: torch._foreach_addcdiv(xs, xs, torch._foreach_add(xs, 10.0), value=0.1),
    ):
        assert_same(*(function([numbers(device), numbers(device)[0]]) for device in (CPU, SIM)))
    xs, ys = [numbers(SIM), numbers(SIM)[1]], [numbers(SIM), numbers(SIM)[0]]
    torch._foreach_add_(xs, ys)
    torch._foreach_copy_(ys, xs)
    assert_same([numbers(CPU) * 2, numbers(CPU)[1] + numbers(CPU)[0]], ys)


def flat_training(device: str) -> list[Tensor]:
    """Train parameters that are views of one vector, by gradients that are views of another."""
    torch.manual_seed(0)
    model = mlp().to(device).eval()
    sizes = [p.numel() for p in model.parameters()]
    flat, gradient = (torch.zeros(sum(sizes), device=device) for _ in range(2))
    for p, own, own_gradient in zip(model.parameters(), flat.split(sizes), gradient.split(sizes), strict=True):
        own.copy_(p.data.view(-1))
        p.data = own.view(p.shape)
        p.grad = own_gradient.view(p.shape)
    kept = []
    for _ in range(3):
        for scale in (1.0, 2.0):
            model(scale * inputs("vectors").to(device)).square().mean().backward()
        kept += [gradient.clone(), gradient.norm()]
        flat.add_(gradient, alpha=-0.1)
        gradient.zero_()
    for p in model.parameters():
        assert p.untyped_storage().data_ptr() == flat.data_ptr()
        assert p.grad is not None
        assert p.grad.untyped_storage().data_ptr() == gradient.data_ptr()
    return [*kept, flat, *(p.detach() for p in model.parameters())]


def flat_vectors() -> None:
    assert_same(flat_training(CPU), flat_training(SIM))


def functional_gradients(device: str) -> list[Tensor]:
    """Gradients by sample, and of several sets of parameters at once."""
    torch.manual_seed(0)
    model = mlp().to(device).eval()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).square().mean()

    several = {name: torch.stack([p, 2 * p]) for name, p in parameters.items()}
    by_sample = vmap(grad(loss), in_dims=(None, 0))(parameters, inputs("vectors").to(device))
    by_set = vmap(grad(loss), in_dims=(0, None))(several, inputs("vectors").to(device))
    return [*by_sample.values(), *by_set.values()]


def functional() -> None:
    assert_same(functional_gradients(CPU), functional_gradients(SIM))
    model, x = encoder(0.0).to(SIM), inputs(SEQUENCES).to(SIM)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = vmap(grad(lambda p, x: functional_call(model, p, (x,)).sum()), in_dims=(None, 0))(
        parameters, torch.stack([x, x])
    )
    assert all(g.device.type == SIM for g in gradients.values())


def exported() -> None:
    for make, kind in ((mlp, "vectors"), (cnn, IMAGES), (encoder, SEQUENCES), (lambda: nn.Embedding(7, 3), TOKENS)):
        outputs = []
        for device in (CPU, SIM):
            torch.manual_seed(0)
            model, x = make().to(device).eval(), inputs(kind).to(device)
            outputs.append([torch.export.export(model, (x,)).module()(x).detach()])
        assert_same(*outputs)


def inference_mode() -> None:
    torch.manual_seed(0)
    models = [encoder().eval(), nn.LSTM(8, 6, batch_first=True)]
    outputs = []
    for device in (CPU, SIM):
        with torch.inference_mode():
            x = inputs(SEQUENCES).to(device)
            outputs.append([models[0].to(device)(x), models[1].to(device)(x)[0]])
    assert_same(*outputs)


def second_derivatives() -> None:
    x = numbers(SIM).requires_grad_()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.sum().backward()
    assert_same([6 * numbers(CPU)], [x.grad])


def copies_of_modules() -> None:
    """deepcopy, state_dict, torch.save, to_empty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(SIM)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    twin = copy.deepcopy(model)
    assert twin[0].weight.data_ptr() != model[0].weight.data_ptr()
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    other.to_empty(device=SIM).load_state_dict(state)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for found in (twin.state_dict(), other.state_dict(), torch.load(file)):
        assert_same(list(state.values()), list(found.values()))
    file.seek(0)
    assert all(value.is_cpu for value in torch.load(file, map_location=CPU).values())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 3, device=SIM)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[model[0].weight]["exp_avg"].device.type == SIM


def accelerator() -> None:
    """It is torch's current accelerator, and code for any of these runs."""
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device(SIM)
    assert torch.accelerator.device_count() == torch.sim.hardware.devices
    assert torch.get_device_module(SIM) is torch.sim
    assert str(numbers(SIM).device) == "sim:0"
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    stream, event = torch.Stream(SIM), torch.Event(SIM)
    with stream:
        event.record()
    torch.accelerator.current_stream().wait_event(event)
    stream.synchronize()
    event.synchronize()
    numbers(SIM).record_stream(stream)
    assert event.query()
    with torch.device(SIM):
        assert nn.Linear(2, 2).weight.device.type == SIM
    host = numbers(CPU)
    pinned = host.pin_memory()
    assert pinned[1:].is_pinned()
    assert not host.is_pinned()
    assert_same([host], [pinned.to(SIM, non_blocking=True)])


def forks() -> int:
    """Return how a fork of this process ends that uses the device; for a process that has run no backward pass yet."""
    with warnings.catch_warnings():  # from 3.12 on: a thread is running, which waits for the end of main
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            flat_vectors()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


CASES = [
    *(factories, random_numbers, generators, out_arguments, in_place, others, foreach_operations, flat_vectors),
    *(functional, exported, inference_mode, second_derivatives, copies_of_modules, accelerator),
]
