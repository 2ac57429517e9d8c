"""What --show-stages prints."""

import torch
from torch import nn

from paceline.replica.capture.capture import capture
from paceline.replica.pipeline.costs import Costs
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.cut_groups import Units, group
from paceline.replica.pipeline.cut_table import cut_table
from paceline.replica.pipeline.partition import UnitCosts
from tests.replica.pipeline.cut_models import from_zoo


def priced(units: Units) -> Costs:
    """Each unit takes a millisecond; each value is a thousand bytes."""
    nodes = units.captured.module.graph.nodes
    return Costs(UnitCosts([0.001] * len(units.groups)), {node.name: 1000 for node in nodes})


def test_three_stages_of_a_tied_model() -> None:
    _, _, units = from_zoo("tied")
    parts = cut(units, [units.modules()["layers.1"], units.nodes()["tanh_1"]])
    assert (
        cut_table(parts, units, priced(units))
        == """\
3 stages; slowest: 6 ms, forward and backward of one micro-batch; bytes sent: of one micro-batch, forward

stage  from       to        time  parameters  sends                   tied
    0  embedding  add_1     42 %         288  to 1: 1 kB, to 2: 1 kB  embedding.weight (also 2)
    1  layers.1   layers.1   8 %         156  to 2: 1 kB
    2  tanh_1     head      50 %         288                          embedding.weight (also 0)"""
    )


def test_nothing_tied_and_nothing_sent_need_no_columns() -> None:
    units = group(capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)))
    assert (
        cut_table(cut(units, []), units, priced(units))
        == """\
1 stage; slowest: 2 ms, forward and backward of one micro-batch; bytes sent: of one micro-batch, forward

stage  from  to   time  parameters
    0  0     1   100 %          20"""
    )


def test_a_module_that_is_cut_is_shown_with_the_node() -> None:
    _, _, units = from_zoo("gpt2")
    shown = cut_table(cut(units, [units.nodes()["scaled_dot_product_attention_1"]]), units, priced(units)).splitlines()
    assert "transformer.h.1.attn (scaled_dot_product_attention_1)" in shown[-1]
    assert shown[-2].split()[1] == "transformer.wte"
    assert "lm_head" in shown[-1]
