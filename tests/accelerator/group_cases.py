"""What ranks with a device each do in a process group; each function returns what failed, by name."""

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import paceline.comm
from paceline.comm.fork_server import ForkServer
from tests.accelerator import running
from tests.accelerator.model_cases import assert_same, inputs, mlp

# torch has renamed these: up to 2.12 they have the second name.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def own(rank: int, elements: int = 6) -> Tensor:
    """Return what a rank brings."""
    return torch.arange(float(elements), device="sim") * (rank + 1)


def all_reduce(rank: int) -> None:
    x = own(rank)
    dist.all_reduce(x)
    assert_same([3 * own(0).cpu()], [x])
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert work.result()[0] is x


def all_reduce_of_views(rank: int) -> None:
    """Parts of a flat vector, one of which is not contiguous."""
    flat = own(rank, 12)
    dist.all_reduce(flat[2:5])
    dist.all_reduce(flat[6:].view(2, 3).t())
    expected = own(rank, 12).cpu()
    expected[2:5] = 3 * own(0, 12).cpu()[2:5]
    expected[6:] = 3 * own(0, 12).cpu()[6:]
    assert_same([expected], [flat])


def reduce_scatter(rank: int) -> None:
    out = torch.zeros(3, device="sim")
    reduce_scatter_single(out, own(rank))
    assert_same([(3 * own(0).cpu())[3 * rank : 3 * rank + 3]], [out])


def all_gather(rank: int) -> None:
    out = torch.zeros(12, device="sim")
    all_gather_single(out, own(rank))
    assert_same([torch.cat([own(0).cpu(), own(1).cpu()])], [out])
    outs = [torch.zeros(6, device="sim") for _ in range(2)]
    dist.all_gather(outs, own(rank))
    assert_same([own(0).cpu(), own(1).cpu()], outs)


def broadcast(rank: int) -> None:
    x = own(rank)
    dist.broadcast(x, 1)
    assert_same([own(1).cpu()], [x])


def all_to_all(rank: int) -> None:
    out = torch.zeros(6, device="sim")
    dist.all_to_all_single(out, own(rank))
    assert_same([torch.cat([own(0).cpu()[3 * rank :][:3], own(1).cpu()[3 * rank :][:3]])], [out])


def two_ranks(rank: int) -> None:
    x = own(5) if rank == 0 else own(0)
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    assert_same([own(5).cpu()], [x])
    there = torch.zeros(6, device="sim")
    operations = [dist.P2POp(dist.isend, own(rank), 1 - rank), dist.P2POp(dist.irecv, there, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert_same([own(1 - rank).cpu()], [there])


def objects(rank: int) -> None:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": 0}, {"rank": 1}]


def subgroups(rank: int) -> None:
    group = dist.new_group([1])
    if rank == 1:
        x = own(rank)
        dist.all_reduce(x, group=group)
        assert_same([own(1).cpu()], [x])
    dist.barrier()


def functional(rank: int) -> None:
    x = dist._functional_collectives.all_reduce(own(rank), "sum", dist.group.WORLD)
    assert_same([3 * own(0).cpu()], [dist._functional_collectives.wait_tensor(x)])


def counted(rank: int) -> None:
    """Bytes of collectives are no copies."""
    x = own(rank)
    torch.sim.copies.reset()
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.barrier()
    assert torch.sim.copies == type(torch.sim.copies)(collective_bytes=48), torch.sim.copies


def tensors_on_the_cpu(rank: int) -> None:
    """Carried by the group that is for them as well, refused by the other."""
    x = torch.ones(3)
    if dist.get_backend() == "simshm_cpu":
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3
        return
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        assert "device type cpu" in str(error)  # noqa: PT017 (not in a test)
    else:
        raise AssertionError("taken")


def parallel_gradients(rank: int, divide: Callable[[nn.Module], nn.Module], rows: slice) -> None:
    """Raise AssertionError unless a divided model has the gradients of one process with all rows."""
    torch.manual_seed(0)
    whole, divided = mlp().eval(), mlp().eval()
    divided.load_state_dict(whole.state_dict())
    whole(inputs("vectors")).square().mean().backward()
    parallel = divide(divided.to("sim"))
    parallel(inputs("vectors")[rows].to("sim")).square().mean().backward()
    for expected, parameter in zip(whole.parameters(), divided.parameters(), strict=True):
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert found.device.type == "sim"
        torch.testing.assert_close(expected.grad, found.cpu())  # sums of two ranks are rounded twice


def data_parallel(rank: int) -> None:
    parallel_gradients(rank, DistributedDataParallel, slice(2 * rank, 2 * rank + 2))


def fully_sharded(rank: int) -> None:
    mesh = init_device_mesh("sim", (2,))

    def divide(model: nn.Module) -> nn.Module:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    parallel_gradients(rank, divide, slice(2 * rank, 2 * rank + 2))


def tensor_parallel(rank: int) -> None:
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    mesh = init_device_mesh("sim", (2,))
    parallel_gradients(rank, lambda model: parallelize_module(model, mesh, plan), slice(None))


CASES: list[Callable[[int], None]] = [
    *(all_reduce, all_reduce_of_views, reduce_scatter, all_gather, broadcast, all_to_all, two_ranks, objects),
    *(subgroups, functional, counted, tensors_on_the_cpu, data_parallel, fully_sharded, tensor_parallel),
]


def outcomes(rank: int, store: str, backend: str) -> dict[str, str | None]:
    """Do all of them as one of two ranks; return each one's traceback, or None, by its name."""
    paceline.comm.register()
    importlib.import_module("tests.accelerator.process_group")
    device = torch.device("sim:0")
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2, device_id=device)
    found = dict[str, str | None]()
    for case in CASES:
        found[case.__name__] = None
        try:
            case(rank)
        except Exception:
            found[case.__name__] = traceback.format_exc()
    dist.destroy_process_group()
    return found


def ranks(
    fork_server: ForkServer, store: Path, backend: str, *, device: str = running.PYTHON
) -> list[dict[str, str | None]]:
    """Have two ranks do all of them; return the outcomes of each."""
    calls = [{"rank": rank, "store": str(store), "backend": backend} for rank in range(2)]
    return running.run_all(fork_server, f"{__name__}:outcomes", calls, device=device)
