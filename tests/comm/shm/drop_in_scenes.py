"""Programs written against torch.distributed, as they would be written for Gloo. Each returns all that it trained."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

with warnings.catch_warnings():  # torch 2.13 compiles its old optimizers there, by functions it calls deprecated
    warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

Trained = dict[str, Any]
"""By name, numbers; JSON keeps every bit of a float."""

WIDTH, STEPS = 12, 4


def in_double(rank: int, size: int, program: str, **args: Any) -> Trained:
    """Another scene, in float64."""
    torch.set_default_dtype(torch.float64)
    trained: Trained = globals()[program](rank, size, **args)
    return trained


class Blocks(nn.Module):
    """Residual blocks; ``extra`` takes part in every other forward pass only."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(blocks)
        )
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.with_extra = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.head(self.extra(x) if self.with_extra else x)
        return y


def _model(make: Callable[[], nn.Module] = Blocks) -> Any:
    torch.manual_seed(0)
    return make()


def _batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(3, (8,), generator=generator)


def _learn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss.item()


def _trained(model: nn.Module, **more: Any) -> Trained:
    return {name: _numbers(p) for name, p in (*model.named_parameters(), *model.named_buffers())} | more


def _numbers(x: Tensor) -> Any:
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return whole.detach().tolist()


def data_parallel(rank: int, size: int, accumulate: int = 1, unused: bool = False, **options: Any) -> Trained:
    """DDP with several buckets."""
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.002, find_unused_parameters=unused, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        model.module.with_extra = not (unused and step % 2)
        with model.no_sync():
            for micro in range(1, accumulate):
                losses.append(_learn(model, _batch(100 * micro + step, rank)))
        losses.append(_learn(model, _batch(step, rank)))
        optimizer.step()
        optimizer.zero_grad()
    return _trained(model.module, losses=losses)


def sparse_gradients(rank: int, size: int) -> Trained:
    """DDP of embeddings, of whose gradients only the rows that were looked up are sent."""
    model = DistributedDataParallel(_model(lambda: nn.EmbeddingBag(50, 3, sparse=True)), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        words = torch.randint(50, (4, 5 + rank), generator=torch.Generator().manual_seed(10 * step + rank))
        model(words).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _trained(model.module)


def uneven_inputs(rank: int, size: int) -> Trained:
    """Join: rank r has r + 2 batches; those that are done shadow the others' collectives."""
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.002)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(rank + 2):
            optimizer.zero_grad()
            _learn(model, _batch(step, rank))
            optimizer.step()
    return _trained(model.module)


def sharded_optimizer(rank: int, size: int) -> Trained:
    """ZeRO-1 with Adam; its state, consolidated."""
    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        _learn(model, _batch(step, rank))
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    moments = {f"moment {n}": _numbers(values["exp_avg"]) for n, values in state.items()}
    return _trained(model.module) | moments


def fully_sharded(rank: int, size: int, mesh: list[int], reshard: bool = True, half: bool = False) -> Trained:
    """FSDP2, also by two dimensions, where the second is sharded and the first replicated."""
    model = _fully_shard(_model(), _mesh(mesh), reshard=reshard, half=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        losses.append(_learn(model, _batch(step, rank)))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return _trained(model, losses=losses, norm=_numbers(norm))


def _mesh(sizes: list[int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("outer", "inner")[-len(sizes) :])


def _fully_shard(model: Blocks, mesh: DeviceMesh, *, reshard: bool = True, half: bool = False) -> Blocks:
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return model


def tensor_parallel(rank: int, size: int, mesh: list[int]) -> Trained:
    """Column- and row-wise parallel blocks; under FSDP2 as well where the mesh has two dimensions."""
    axes, model = _mesh(mesh), _model()
    inner = axes["inner"]
    for block in model.blocks:
        parallelize_module(block, inner, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if len(mesh) == 2:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=axes["outer"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        losses.append(_learn(model, _batch(step, rank // mesh[-1])))
        optimizer.step()
        optimizer.zero_grad()
    return _trained(model, losses=losses)


def redistributed(rank: int, size: int) -> Trained:
    """A DTensor that no count of ranks divides, through every change of its placement."""
    mesh = _mesh([size])
    torch.manual_seed(0)
    whole, found = torch.randn(5, 7), {}
    for start in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(whole, mesh, [start])
        for end in (Shard(0), Shard(1), Replicate()):
            found[f"{start} to {end}"] = _numbers(x.redistribute(mesh, [end]).to_local())
    for end in (Shard(0), Shard(1), Replicate()):
        partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
        found[f"partial to {end}"] = _numbers(partial.redistribute(mesh, [end]).to_local())
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    return found | {"product": _numbers(product)}


def pipeline(rank: int, size: int, schedule: str, stages_each: int = 1) -> Trained:
    """One block a stage; the last stage's losses, one a micro-batch."""
    count = size * stages_each
    model = _model(functools.partial(Blocks, count))
    kind = get_schedule_class(schedule)
    stages = [_stage(model, rank + n * size, count) for n in range(stages_each)]
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.1)
    run = kind(stages if stages_each > 1 else stages[0], 4, loss_fn=nn.functional.mse_loss)
    losses: list[Any] = []
    for step in range(STEPS):
        of_step: list[Tensor] = []
        inputs = (_batch(step)[0],) if rank == 0 else ()
        last = {"target": _batch(step + 100)[0], "losses": of_step} if rank == size - 1 else {}
        run.step(*inputs, **last)
        losses += map(_numbers, of_step)
        optimizer.step()
        optimizer.zero_grad()
    trained = {f"stage {s.stage_index} {n}": _numbers(p) for s in stages for n, p in s.submod.named_parameters()}
    return trained | {"losses": losses}


def _stage(model: Blocks, index: int, count: int) -> PipelineStage:
    return PipelineStage(model.blocks[index], index, count, torch.device("cpu"))


def checkpointed(rank: int, size: int, folder: str) -> Trained:
    """DCP of an FSDP2 model and its optimizer, into ones that had gone another way."""
    found: Trained = {}
    for name, seen in (("saved", 3), ("loaded", 1)):
        model = _fully_shard(_model(), _mesh([size]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(seen):
            _learn(model, _batch(step, rank))
            optimizer.step()
            optimizer.zero_grad()
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)) | {"step": seen}
        if name == "saved":
            dcp.save(state, checkpoint_id=folder)
        else:
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        moments = [_numbers(values["exp_avg"]) for values in optimizer.state.values()]
        found[name] = _trained(model, moments=moments, step=state["step"])
    return found


def read_by_one(rank: int, size: int, folder: str) -> Trained:
    """A file of ``torch.save``, that one rank reads and broadcasts to the others."""
    path, model = f"{folder}/whole.pt", _model()
    if rank == 0:
        torch.save(model.state_dict(), path)
    state = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
    dist.barrier()
    with warnings.catch_warnings():  # torch 2.13 itself asks in a way that it calls old
        warnings.filterwarnings("ignore", "`_get_pg_default_device` will be deprecated", UserWarning)
        dcp.load(state, storage_reader=BroadcastingTorchSaveReader(path), planner=DynamicMetaLoadPlanner())
    return {"loaded": {name: _numbers(x) for name, x in state.items()}, "saved": _trained(model)}


def in_subgroups(rank: int, size: int) -> Trained:
    """Two jobs beside each other, DDP in each half of the ranks, then the mean of both over the mesh's other axis."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    model = DistributedDataParallel(_model(), process_group=mesh.get_group("inner"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        _learn(model, _batch(step, rank))
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            dist.all_reduce(p.data, group=mesh.get_group("outer"))
            p.data.div_(2)
    return _trained(model.module)
