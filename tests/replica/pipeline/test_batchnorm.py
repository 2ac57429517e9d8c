"""Running statistics of a whole mini-batch."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

from paceline.replica.base import Batch
from paceline.replica.capture.capture import capture
from paceline.replica.pipeline.cut_groups import Units, group
from tests.replica.pipeline.hand_cuts import Norms, evenly
from tests.replica.pipeline.pipeline_world import Alone, Values, World, batches, build, program, rows, same

BUFFERS = tuple(
    f"{layer}.{name}"
    for layer in ("l0.1", "l1.1", "l2.2")
    for name in ("running_mean", "running_var", "num_batches_tracked")
)


def by_the_book(module: nn.Module, batch: Batch, borders: list[tuple[int, int]]) -> Values:
    """What each layer's statistics are to be after a mini-batch, by definition: of all that was put into it.

    Micro-batches go through the layers before it one by one, normalised by themselves; the mean and the unbiased
    variance are then those of all their values together.
    """
    given: dict[str, list[Tensor]] = {}
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    }
    before = {name: copy.deepcopy(layer) for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, args, name=name: given.setdefault(name, []).append(args[0].detach()))
    for start, stop in borders:
        module(rows(batch.input, start, stop))
    expected: Values = {}
    for name, layer in before.items():
        values = torch.cat(given[name]).transpose(0, 1).flatten(1)
        count = layer.num_batches_tracked + 1
        factor = 1 / float(count) if layer.momentum is None else layer.momentum
        for which, value in (("running_mean", values.mean(1)), ("running_var", values.var(1))):
            expected[f"{name}.{which}"] = (1 - factor) * getattr(layer, which) + factor * value
        expected[f"{name}.num_batches_tracked"] = count
    return expected


@pytest.mark.parametrize("recompute", ["none", "boundaries", "all"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "interleaved:chunks=2"])
@pytest.mark.parametrize("exported", [False, True])
def test_statistics_are_those_of_the_mini_batch(schedule: str, recompute: str, exported: bool) -> None:
    """Three mini-batches; parameters stay as they are, so the same module says what is right for each."""
    options = {"batchnorm": "mini-batch", "recompute": recompute}
    workers = 2 if "interleaved" not in schedule or exported else 1
    parts = 2 * workers if "interleaved" in schedule else workers
    cutter = evenly(captured(), parts) if exported else None
    kind = Exportable if exported else Norms
    world = World(program(kind), kind, schedule, workers, 2, options, buffers=BUFFERS, cutter=cutter)
    module, alone = build(kind), Alone(program(kind), 2)
    for batch, borders in zip(
        batches(Norms, 4, 7, 4), ([(0, 2), (2, 4)], [(0, 4), (4, 7)], [(0, 2), (2, 4)]), strict=True
    ):
        expected = by_the_book(copy.deepcopy(module), batch, borders)
        world.all(lambda member, batch=batch: member.gradient(batch))
        found = world.gradients()
        same({name: found[name] for name in BUFFERS}, expected)
        alone.gradient(batch)  # outputs and gradients are those of micro-batches all the same
        same({name: value for name, value in found.items() if name not in BUFFERS}, alone.gradients())
        module.load_state_dict({**module.state_dict(), **expected})
        for member in world.members:
            for mine, made in zip(member.state.buffers, member.delta.buffers, strict=True):
                mine.copy_(made)


def test_the_first_layers_statistics_do_not_depend_on_micro_batches() -> None:
    """Nothing before it is normalised: they are those of an unpipelined BatchNorm on the whole mini-batch."""
    (batch,) = batches(Norms, 8)
    module = build(Norms)
    module(batch.input)
    whole = {name: value for name, value in module.named_buffers() if name.startswith("l0")}
    found = {}
    for how in ("mini-batch", "micro-batch"):
        world = World(program(Norms), Norms, "1f1b", 2, 4, {"batchnorm": how}, buffers=BUFFERS)
        world.all(lambda member: member.gradient(batch))
        found[how] = world.gradients()
    same({name: found["mini-batch"][name] for name in whole}, whole)
    assert not torch.allclose(found["micro-batch"]["l0.1.running_mean"], whole["l0.1.running_mean"], rtol=1e-3)
    assert int(found["micro-batch"]["l0.1.num_batches_tracked"]) == 4


@functools.cache
def captured() -> Units:
    """With aten.batch_norm nodes."""
    return group(capture(build(Exportable), torch.randn(4, 1, 5, 5, dtype=torch.float64)))


class Exportable(Norms):
    """A graph can't hold a momentum that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.l2[2].momentum = 0.2
