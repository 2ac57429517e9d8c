"""What must stay together does, and nothing else."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import paceline.replica.capture.capture as marking
from paceline.core.errors import InputError
from paceline.replica.pipeline.cut_groups import Units, group
from tests.replica.pipeline.cut_models import aten, by_hand, calls, cut, from_zoo, item, made, together, units_of

NAMES = ["mlp", "cnn", "unet", "inception", "encoder", "tied", "masked", "gpt2", "bert", "vit", "resnet"]


@pytest.mark.parametrize("name", NAMES)
def test_every_node_is_in_one_unit_or_free(name: str) -> None:
    _, _, units = from_zoo(name)
    graph = units.captured.module.graph
    calling = [node for node in graph.nodes if node.op.startswith("call")]
    grouped = [node for nodes in units.groups for node in nodes]
    assert sorted([*grouped, *units.free, *units.sizes], key=lambda n: n.name) == sorted(calling, key=lambda n: n.name)
    assert all(units.place[node] == unit for unit, nodes in enumerate(units.groups) for node in nodes)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in grouped:
        for read in node.all_input_nodes:
            assert read not in units.place or units.place[read] <= units.place[node]
            assert order[read] < order[node]


@pytest.mark.parametrize(("name", "least"), [("gpt2", 100), ("bert", 40), ("vit", 40), ("resnet", 20), ("unet", 15)])
def test_models_can_be_cut_in_many_places(name: str, least: int) -> None:
    assert len(from_zoo(name)[2].groups) >= least


class Residual(nn.Module):
    """Adds in place to what a norm has made, with work of its own in between, and reads a view of it before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.short, self.last = (
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        before = y.view(-1).sum()
        y += self.short(x)
        return self.last(y) * before


def test_a_write_stays_with_who_made_and_read_it_before() -> None:
    units = units_of(Residual(), torch.randn(3, 4).double())
    (one,) = together(units)
    assert one == {"layer_norm", "view", "sum_1", "linear_1", "add_"}
    assert [nodes[0].name for nodes in units.groups] == ["linear", "layer_norm", "linear_2", "mul"]


def test_a_write_through_a_view_is_a_write() -> None:
    def build(graph: Graph) -> object:
        value = calls(graph, aten.sigmoid, made(graph))
        other = calls(graph, aten.exp, value)
        row = calls(graph, aten.select.int, calls(graph, aten.t, value), 0, 0)
        calls(graph, aten.zero_, row)
        return calls(graph, aten.add.Tensor, calls(graph, aten.sin, value), other)

    (one,) = together(group(by_hand({}, build)))
    assert one == {"sigmoid", "exp", "t", "select", "zero_"}


def test_a_buffer_that_is_written_belongs_to_one_part() -> None:
    def build(graph: Graph) -> object:
        counted = calls(graph, aten.mul.Tensor, made(graph), graph.get_attr("count"))
        later = calls(graph, aten.cos, counted)
        calls(graph, aten.add_.Tensor, graph.get_attr("count"), 1)
        return calls(graph, aten.exp, calls(graph, aten.div.Tensor, later, graph.get_attr("count")))

    units = group(by_hand({"count": torch.ones(())}, build))
    assert together(units) == [{"mul", "cos", "add_", "div"}]
    assert len(units.groups) == 3


def test_an_input_that_is_written_is_read_by_one_part() -> None:
    def build(graph: Graph) -> object:
        x = graph.placeholder("x")
        first = calls(graph, aten.sin, x)
        written = calls(graph, aten.mul_.Tensor, x, 2.0)
        both = calls(graph, aten.add.Tensor, first, x)
        return calls(graph, aten.exp, calls(graph, aten.add.Tensor, both, written))

    units = group(by_hand({}, build))
    assert together(units) == [{"sin", "mul_", "add"}]
    assert [nodes[0].name for nodes in units.groups] == ["sin", "add_1", "exp"]


def test_batch_norm_keeps_its_counter_and_shared_norms_stay_together() -> None:
    _, _, units = from_zoo("resnet")
    for nodes in units.groups:
        assert not all(node.name.startswith("add_") for node in nodes), "a counter is no part of its own"
    norm = nn.BatchNorm1d(4)
    twice = units_of(
        nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4)), torch.randn(3, 4).double()
    )
    assert together(twice) == [{"_1", "_2", "_1_1"}]


def test_a_constant_binds_nobody() -> None:
    units = group(
        by_hand(
            {"shift": torch.ones(3)},
            lambda graph: calls(
                graph,
                aten.mul.Tensor,
                calls(graph, aten.matmul, graph.placeholder("x"), graph.get_attr("shift")),
                graph.get_attr("shift"),
            ),
        )
    )
    assert [len(nodes) for nodes in units.groups] == [1, 1]


def test_items_go_with_their_producer_however_late_they_are_taken() -> None:
    def build(graph: Graph) -> object:
        parts = calls(graph, aten.split.Tensor, made(graph), 2)
        first = calls(graph, aten.exp, item(graph, parts, 0))
        return calls(graph, aten.add.Tensor, first, item(graph, parts, 1))

    units = group(by_hand({}, build))
    assert together(units) == [{"split", "getitem", "getitem_1"}]
    assert [nodes[0].name for nodes in units.groups] == ["mm", "split", "exp", "add"]


def test_what_reads_how_elements_lie_stays_with_their_maker() -> None:
    def build(graph: Graph) -> object:
        value = made(graph)
        other = calls(graph, aten.exp, value)
        return calls(graph, aten.add.Tensor, calls(graph, aten.as_strided, value, [2], [1]), other)

    assert together(group(by_hand({}, build))) == [{"mm", "exp", "as_strided"}]


def test_modules_in_place_stay_with_what_they_write() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
    )
    assert together(units_of(model, torch.randn(3, 4).double())) == [{"_0", "_1", "_2"}]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.act(x))


def test_blocks_that_may_write_their_input_are_cut_apart_and_work_on_copies() -> None:
    units = units_of(nn.Sequential(nn.Linear(4, 4), Block(), Block()), torch.randn(3, 4).double())
    assert not together(units)
    assert {node.name for node in units.copied} == {"_0", "_1"}


class Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        seen = torch.rand(x.shape[1], x.shape[1]) < 2
        filled = torch.zeros(x.shape[1])
        filled.fill_(1.0)
        scale = self.last.weight.new_ones(1) * torch.tensor(1.0)
        hidden = self.first(x) @ self.first(x).mT
        hidden = hidden * (causal & kept.unsqueeze(1)) * seen * filled
        return self.last(hidden @ x) * scale


def test_only_what_inputs_and_constants_give_for_sure_is_done_again() -> None:
    inputs = (torch.randn(3, 5, 4).double(), torch.ones(3, 5, dtype=torch.bool))
    units = units_of(Mask(), inputs)
    free, bound = ({node.name for node in nodes} for nodes in (units.free, units.place))
    assert {"tril", "unsqueeze", "and_1"} <= free
    assert {"rand", "lt", "zeros", "fill_", "new_ones", "mul_3"} & free == set()
    assert {"rand", "lt", "zeros", "fill_", "new_ones"} <= bound


class Marked(nn.Module):
    """Marks before, between, twice in one place, and after the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = marking.cut(x)
        skip = self.layers[0](x)
        x, skip = marking.cut(skip, skip)
        x = marking.cut(x)
        x = self.layers[2](self.layers[1](x).tanh())
        x = marking.cut(x)
        return marking.cut(self.layers[3](x) + skip)


def marked() -> Units:
    return units_of(Marked(), torch.randn(3, 4).double())


def test_marks_are_the_only_places_to_cut() -> None:
    units = marked()
    names = [nodes[0].name for nodes in units.groups]
    assert [names[unit] for unit in units.candidates] == ["linear_1", "linear_3"] == [names[u] for u in units.marks]
    assert not any("cut" in node.name for node in (*units.place, *units.free, *units.sizes))


def test_without_marks_every_unit_may_begin_a_part() -> None:
    _, _, units = from_zoo("unet")
    assert units.marks == ()
    assert units.candidates == tuple(range(1, len(units.groups)))


def test_a_mark_between_a_value_and_its_writer_is_refused() -> None:
    def build(graph: Graph) -> object:
        value = item(graph, calls(graph, cut, [calls(graph, aten.sin, made(graph))]), 0)
        return calls(graph, aten.exp, calls(graph, aten.relu_, value))

    wanted = r"paceline.cut in cut stands between 'sin' and 'relu_', .* write the operation out of place .* or move"
    with pytest.raises(InputError, match=wanted):
        group(by_hand({}, build))


def test_modules_and_nodes_have_their_first_unit() -> None:
    _, _, units = from_zoo("tied")
    modules, nodes = units.modules(), units.nodes()
    assert modules["embedding"] == modules["layers"] - 2 == 0
    assert modules["layers.0"] == modules["layers"] < modules["layers.1"] < modules["layers.2"] < modules["head"]
    assert nodes["linear_1"] == modules["layers.1"]
