"""A part of a model may have sizes as inputs as well as tensors: an extent looks at tensors alone."""

import torch
from torch.fx import Graph

from paceline.replica.tensor.branch_on_rank import Extent, model_inputs


def test_sizes_that_a_part_is_given_are_no_inputs_whose_shape_is_known() -> None:
    graph = Graph()
    size, image = graph.placeholder("sym_size"), graph.placeholder("image")
    size.meta["val"], image.meta["val"] = 3, torch.zeros(3, 8)
    made = graph.call_function(torch.ops.aten.relu.default, (image,))
    graph.output((made,))
    assert model_inputs(made) == [image]
    extent = Extent(torch.zeros(3, 8), [node.meta["val"] for node in model_inputs(made)])
    assert extent.complete
    assert extent.of([]) == (3, 8)
