"""torch's side of a mesh: FSDP2, parallelize_module and torch.distributed.pipelining, put together by hand.

====================  =============================================================================================
shards                ``parallelize_module``: columns, then rows, of attention and MLP; the head by columns
replicas              ``fully_shard`` of each layer and of the rest
stages                ``Schedule1F1B`` over parts of whole layers
replicas × stages     one all-reduce of all gradients after the schedule, over the ranks of a part: wrapped in DDP or
                      FSDP2, a part would reduce with each micro-batch
====================  =============================================================================================
"""

from typing import Any

import torch
import torch.distributed as dist
from meshes import HEADS, LENGTH, MICRO_BATCHES, OPTIMIZER, SAMPLES, WORDS, Loss, Mesh, Size, Words, data
from sides import Side, whole
from torch import Tensor, nn

COLUMNS, ROWS = ("queries", "keys", "values", "wide"), ("mixed", "narrow")


def can(mesh: Mesh, size: Size) -> bool:
    """Whether heads and layers come out even."""
    return HEADS % mesh.shards == 0 and size.layers % mesh.stages == 0


class Piece(nn.Module):
    """Some layers in a row, with what comes before the first and after the last, under their own names."""

    def __init__(self, model: Words, number: int, count: int) -> None:
        super().__init__()
        each = len(model.layers) // count
        names = list(model.layers)[number * each : (number + 1) * each]
        self.layers = nn.ModuleDict({name: model.layers[name] for name in names})
        self.begins, self.ends = number == 0, number == count - 1
        if self.begins:
            self.tokens, self.places = model.tokens, model.places
        if self.ends:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.begins:
            x = self.tokens(x) + self.places
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.ends else x


class Theirs(Side):
    """One rank's, on Gloo.

    Args:
        mesh: all ranks, in the order in which Paceline has them.
        size: of the model.
    """

    def __init__(self, mesh: Mesh, size: Size) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._mesh, self._ranks = mesh, init_device_mesh("cpu", tuple(mesh), mesh_dim_names=mesh._fields)
        replica, self._stage, _ = self._ranks.get_coordinate()
        self._x, self._y = (each[:SAMPLES].chunk(mesh.replicas)[replica] for each in data())
        self._module = Piece(size.built(), self._stage, mesh.stages)
        self._divide()
        self._optimizer = OPTIMIZER(self._module.parameters())
        self._pipeline = self._scheduled(size) if mesh.stages > 1 else None

    def step(self) -> None:
        self._optimizer.zero_grad()
        if self._pipeline is None:
            torch.autograd.backward(Loss(self._module(self._x), self._y))
        else:
            given = (self._x,) if self._stage == 0 else ()
            wanted: dict[str, Any] = {"target": self._y} if self._stage == self._mesh.stages - 1 else {}
            self._pipeline.step(*given, **wanted, losses=[] if wanted else None, return_outputs=False)
            self._average()
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        return {name: whole(parameter.detach()).clone() for name, parameter in self._module.named_parameters()}

    def _divide(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self._mesh.shards > 1:
            for layer in self._module.layers.values():
                plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
                parallelize_module(layer, self._ranks["shards"], plan)
                layer.heads = HEADS // self._mesh.shards  # torch leaves that to whoever writes the model
            if self._module.ends:
                head = ColwiseParallel(output_layouts=Replicate())
                parallelize_module(self._module, self._ranks["shards"], {"head": head})
        if self._mesh.replicas > 1 and self._mesh.stages == 1:
            for each in (*self._module.layers.values(), self._module):
                fully_shard(each, mesh=self._ranks["replicas"])

    def _scheduled(self, size: Size) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        samples = len(self._x) // MICRO_BATCHES
        crosses = torch.empty(samples, LENGTH, size.width, requires_grad=True)
        scores = torch.empty(samples, LENGTH, WORDS, requires_grad=True)
        takes = self._x[:samples] if self._module.begins else crosses
        gives = scores if self._module.ends else crosses
        group, device = self._ranks.get_group("stages"), torch.device("cpu")
        stage = PipelineStage(self._module, self._stage, self._mesh.stages, device, takes, gives, group=group)
        return Schedule1F1B(stage, MICRO_BATCHES, Loss)

    @torch.no_grad()
    def _average(self) -> None:
        """Gradients over replicas, all in one vector."""
        if self._mesh.replicas == 1:
            return
        local = [_local(parameter.grad) for parameter in self._module.parameters()]
        together = torch.cat([each.reshape(-1) for each in local])
        dist.all_reduce(together, group=self._ranks.get_group("replicas"))
        together /= self._mesh.replicas
        parts = together.split([each.numel() for each in local])
        torch._foreach_copy_(local, [part.view_as(each) for part, each in zip(parts, local, strict=True)])


def _local(gradient: Tensor) -> Tensor:
    """This rank's part; the same memory."""
    from torch.distributed.tensor import DTensor

    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient
